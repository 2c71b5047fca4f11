from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradpilot.policies.adaptive import Adaptive
from gradpilot.policies.base import Inputs
from gradpilot.policies.history import ratio_bucket
from gradpilot.policies.ranking import BEST
from gradpilot.policies.watches import Ban
from gradpilot.protos.explanations import BANNED, BELOW_FLOOR, CHOSEN, IN_FORCE, MARKS, Ranked
from gradpilot.protos.messages import BF16, DENSE, Option
from tests.policies import scenario

TOPK = Option("topk", 0.1, "allgather")


def best(inputs: Inputs) -> tuple[Ranked, ...]:
    outcome = Adaptive().decide(inputs)
    assert outcome.explanation is not None
    return outcome.explanation.best


def marked(ranked: tuple[Ranked, ...], mark: str) -> list[Ranked]:
    assert mark in MARKS
    return [one for one in ranked if mark in one.marks]


def cost(one: Ranked) -> float:
    return one.candidate.step_seconds / one.candidate.efficiency


@pytest.mark.parametrize("per_bucket", [False, True])
@pytest.mark.parametrize("current", [None, DENSE, BF16, TOPK], ids=str)
def test_the_best_of_each_method_by_cost(current: Option | None, per_bucket: bool) -> None:
    settings = scenario.settings(per_bucket=per_bucket)
    inputs = scenario.inputs(mbit=100, current=current, settings=settings)
    outcome = Adaptive().decide(inputs)
    assert outcome.explanation is not None
    ranked = outcome.explanation.best
    costs = [cost(one) for one in ranked]
    assert costs == sorted(costs)
    (chosen,) = marked(ranked, CHOSEN)
    assert chosen.candidate == outcome.chosen
    in_force = marked(ranked, IN_FORCE)
    assert [one.candidate for one in in_force] == ([outcome.current] if current else [])
    free = [one for one in ranked if not {BANNED, BELOW_FLOOR, IN_FORCE} & {*one.marks}]
    assert BEST - 1 <= len(free) <= BEST + 1  # the choice, or the one in force, may be among them
    assert free[0] == chosen
    methods = [
        tuple(dict.fromkeys((o.family, o.collective, o.skip > 0) for o in one.candidate.options))
        for one in free
    ]
    assert len({m for m in methods if len(m) == 1}) == sum(len(m) == 1 for m in methods)


def test_the_first_is_the_least_cost_of_all_that_may_be_taken() -> None:
    outcome = Adaptive().decide(scenario.inputs(mbit=100))
    assert outcome.explanation is not None
    least = min(c.step_seconds / c.efficiency for c in outcome.front if c.gain >= 0.3)
    (chosen,) = marked(outcome.explanation.best, CHOSEN)
    assert cost(chosen) <= least * (1 + 1e-9)


def test_what_is_forbidden_shows_only_if_it_would_be_better() -> None:
    slow = best(scenario.inputs(mbit=20, settings=scenario.settings(gain_floor=0.9)))
    (chosen,) = marked(slow, CHOSEN)
    (low,) = marked(slow, BELOW_FLOOR)
    assert cost(low) < cost(chosen)
    assert low.candidate.gain < 0.9
    fast = best(scenario.inputs(mbit=100_000, alpha=1e-5))
    assert marked(fast, BELOW_FLOOR) == []


def test_a_black_listed_option_is_marked_and_another_is_chosen() -> None:
    inputs = scenario.inputs(mbit=20)
    wanted = marked(best(inputs), CHOSEN)[0].candidate.options[0]
    assert wanted.compressor not in ("none", "bf16")
    ban = Ban(
        wanted.compressor, wanted.settings, wanted.ratio, wanted.collective, wanted.skip,
        "loss", inputs.step, inputs.step + 500, 1, 1e-3, 4e-7,
    )  # fmt: skip
    banned = best(replace(inputs, history=replace(inputs.history, bans=(ban,))))
    found = [one for one in marked(banned, BANNED) if BELOW_FLOOR not in one.marks]
    assert [ratio_bucket(one.candidate.options[0].ratio) for one in found] == [
        ratio_bucket(wanted.ratio)
    ]
    (chosen,) = marked(banned, CHOSEN)
    assert BANNED not in chosen.marks
    assert cost(found[0]) < cost(chosen)


@pytest.mark.parametrize("choice", ["knee", "weighted"])
def test_other_choices_rank_points_of_the_front_by_their_own_value(choice: str) -> None:
    outcome = Adaptive().decide(
        scenario.inputs(mbit=100, settings=scenario.settings(choice=choice))
    )
    assert outcome.explanation is not None
    ranked = outcome.explanation.best
    assert ranked[0].candidate == outcome.chosen
    assert CHOSEN in ranked[0].marks
    points = set(outcome.front)
    assert {one.candidate for one in ranked if not {BANNED, BELOW_FLOOR} & {*one.marks}} <= points


def test_numbers_are_plain() -> None:
    for one in best(scenario.inputs(mbit=100, current=BF16)):
        numbers = (cost(one), one.candidate.gain, one.candidate.wire_ratio)
        assert np.isfinite(numbers).all()

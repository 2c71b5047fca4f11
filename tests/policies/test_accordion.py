from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gradpilot.policies.accordion import PUBLISHED, Accordion, State
from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.published import recall
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import DENSE, Option
from tests.policies import scenario

HIGH = Option("topk", 0.1, "allgather")
INTERVAL = PUBLISHED.interval_steps


def inputs(norms: tuple[float, ...] = (1.0, 2.0, 3.0), **fields: object) -> Inputs:
    made = scenario.inputs(mbit=100)
    states = tuple(
        replace(b, gradient_sq=norm**2) for b, norm in zip(made.buckets, norms, strict=True)
    )
    return replace(made, buckets=states, **fields)  # type: ignore[arg-type]


def follow(before: Inputs, outcome: Outcome, steps: int, *norms: float, **fields: object) -> Inputs:
    assert outcome.history is not None
    plan = scenario.plan(before.layout, outcome.options) if outcome.options else before.current
    history = from_json(type(outcome.history), to_json(outcome.history))
    fields = {"step": before.step + steps, "history": history, "current": plan, **fields}
    return inputs(norms or (1.0, 2.0, 3.0), **fields)


def decide(of: Inputs) -> Outcome:
    return Accordion().decide(of)


def in_force(of: Inputs, outcome: Outcome) -> tuple[Option, ...]:
    if outcome.options:
        return outcome.options
    assert of.current is not None
    return tuple(assignment.option for assignment in of.current.assignments)


def test_the_first_interval_is_critical() -> None:
    first = inputs()
    outcome = decide(first)
    assert outcome.options == (DENSE,) * 3
    assert "3 of 3 buckets in a critical regime: the first interval" in outcome.reason
    # However norms change meanwhile, nothing is detected before the interval ends.
    early = follow(first, outcome, INTERVAL - 1, 1.0, 2.0, 3.0)
    kept = decide(early)
    assert kept.outcome == "keep"
    assert in_force(early, kept) == (DENSE,) * 3


def test_constant_norms_compress_and_stay_so() -> None:
    now = inputs()
    outcome = decide(now)
    for _ in range(3):
        now = follow(now, outcome, INTERVAL)
        outcome = decide(now)
        assert in_force(now, outcome) == (HIGH,) * 3


def test_each_bucket_has_its_own_regime() -> None:
    first = inputs((1.0, 2.0, 0.0))
    # Halved is critical, a third less is not, and after zero everything is.
    second = follow(first, decide(first), INTERVAL, 0.5, 1.34, 1e-9)
    outcome = decide(second)
    assert outcome.options == (DENSE, HIGH, DENSE)
    third = follow(second, outcome, INTERVAL, 0.76, 1.34, 1e-9)
    assert decide(third).options == (DENSE, HIGH, HIGH)
    fourth = follow(third, decide(third), INTERVAL, 0.76, 1.34, 1e-9)
    outcome = decide(fourth)
    assert outcome.options == (HIGH,) * 3
    assert "norms changed by 0 to 0 % since step 2000, critical from 50 %" in outcome.reason


def test_norms_are_compared_with_the_start_of_the_interval() -> None:
    first = inputs()
    halfway = follow(first, decide(first), INTERVAL // 2, 0.7, 2.0, 3.0)
    end = follow(halfway, decide(halfway), INTERVAL // 2, 0.45, 2.0, 3.0)
    assert decide(end).options == (DENSE, HIGH, HIGH)


def test_a_decay_of_the_learning_rate_is_critical_for_one_interval() -> None:
    first = inputs(lr=0.1)
    second = follow(first, decide(first), INTERVAL, lr=0.1)
    outcome = decide(second)
    assert outcome.options == (HIGH,) * 3
    decayed = follow(second, outcome, 50, lr=0.01)
    outcome = decide(decayed)
    assert outcome.options == (DENSE,) * 3
    assert "the learning rate fell from 0.1 to 0.01" in outcome.reason
    during = follow(decayed, outcome, INTERVAL - 1, lr=0.01)
    outcome = decide(during)
    assert in_force(during, outcome) == (DENSE,) * 3
    later = follow(during, outcome, 1, lr=0.01)
    assert decide(later).options == (HIGH,) * 3


@pytest.mark.parametrize("lr", [0.2, 0.095, math.nan, -1.0, math.inf])
def test_a_rise_a_small_fall_or_nonsense_is_no_decay(lr: float) -> None:
    first = inputs(lr=0.1)
    second = follow(first, decide(first), INTERVAL, lr=lr)
    outcome = decide(second)
    assert outcome.options == (HIGH,) * 3
    # What was told last stays known through looks without a rate.
    third = follow(second, outcome, 10, lr=0.01)
    assert decide(third).options == (DENSE,) * 3


def test_another_layout_or_an_earlier_step_starts_over() -> None:
    first = inputs()
    second = follow(first, decide(first), INTERVAL)
    outcome = decide(second)
    again = follow(second, outcome, -1400)
    assert decide(again).options == (DENSE,) * 3
    assert outcome.history is not None
    assert recall(scenario.inputs(sizes=(9,), history=outcome.history), "accordion", State) is None


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
def test_impossible_norms_keep_the_plan(wrong: float) -> None:
    made = inputs()
    broken = (*made.buckets[:2], replace(made.buckets[2], gradient_sq=wrong))
    outcome = decide(replace(made, buckets=broken))
    assert outcome.outcome == "keep"
    assert outcome.history is None
    assert "bucket 2 has no usable gradient norm" in outcome.reason


def test_without_topk() -> None:
    none = tuple(f for f in inputs().families if f.compressor != "topk")
    assert "no topk" in decide(inputs(families=none)).reason

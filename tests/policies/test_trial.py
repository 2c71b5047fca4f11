"""Switches on trial, by themselves and in jobs whose plans turn out worse than predicted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.problem import Space
from gradpilot.policies.trial import LOSS_STEPS, _risen, begin, expand, proceed, reference_cost
from gradpilot.policies.watches import Trial
from gradpilot.protos.messages import BF16, DENSE, LinkEstimate, Option
from tests.policies import scenario

TOPK = Option("topk", 0.03, "allgather")
LINK = LinkEstimate(1e-3, 8e-6 / 100)
MBIT = 100.0


def decide(inputs: Inputs) -> Outcome:
    return POLICIES.get("adaptive")().decide(inputs)


def on_trial(step_seconds: float, **fields: object) -> tuple[Inputs, Space]:
    """A job that went from dense, measured at 1 s, to top-k, with compute as it was."""
    base = scenario.inputs(mbit=MBIT, current=TOPK, steps_since_switch=100)
    trial = Trial((DENSE,), (TOPK,), 900, 1.0, 1.0, base.compute_seconds, 0.0)
    history = replace(base.history, trial=trial, layout=base.layout.digest)
    inputs = replace(base, history=history, step_seconds=step_seconds, **fields)  # type: ignore[arg-type]
    return inputs, Space(inputs, LINK)


def verdict(inputs: Inputs) -> tuple[Trial | None, str]:
    space = Space(inputs, LINK)
    trial, cause, reason = proceed(inputs, space, space.present())
    assert bool(cause) == bool(reason)
    return trial, cause


def test_worse_at_two_looks_is_undone_and_at_one_is_not() -> None:
    inputs, _ = on_trial(10.0)
    trial, cause = verdict(inputs)
    assert (cause, trial.worse if trial else -1) == ("", 1)
    again = replace(inputs, history=replace(inputs.history, trial=trial))
    assert verdict(again) == (None, "cost")
    good, _ = on_trial(0.1)
    between, _ = verdict(replace(good, history=replace(good.history, trial=trial)))
    assert between is not None
    assert (between.worse, between.fine) == (0, 1)


@pytest.mark.parametrize(("share", "worse"), [(1.05, 0), (1.15, 1)])
def test_the_margin_counts_against_what_the_plan_before_would_cost(
    share: float, worse: int
) -> None:
    inputs, space = on_trial(1.0)
    trial, present = inputs.history.trial, space.present()
    assert trial is not None
    assert present is not None
    reference = reference_cost(trial, inputs, space)
    seconds = share * reference * float(present.efficiency[0])
    after, _ = verdict(replace(inputs, step_seconds=seconds))
    assert after is not None
    assert after.worse == worse


def test_a_link_that_became_slower_is_not_the_plans_fault() -> None:
    inputs, space = on_trial(3.0)
    trial = inputs.history.trial
    assert trial is not None
    same = reference_cost(trial, inputs, space)
    slow = Space(inputs, LinkEstimate(1e-3, 8e-6 / 10))
    assert reference_cost(trial, inputs, slow) > 5 * same
    # A faster one leaves what was measured.
    fast = Space(inputs, LinkEstimate(1e-5, 8e-6 / 10_000))
    assert reference_cost(trial, inputs, fast) == trial.left_seconds


def test_stragglers_are_not_the_plans_fault_but_slower_compute_on_all_ranks_is() -> None:
    inputs, space = on_trial(1.0)
    trial = inputs.history.trial
    assert trial is not None
    before = reference_cost(trial, inputs, space)
    slower = replace(inputs, compute_seconds=inputs.compute_seconds + 0.04)
    assert reference_cost(trial, slower, Space(slower, LINK)) == pytest.approx(before)
    late = replace(slower, straggle_seconds=0.04)
    assert reference_cost(trial, late, Space(late, LINK)) > before + 0.03


def test_another_load_is_no_verdict() -> None:
    for factor in (0.4, 2.5):
        inputs, _ = on_trial(100.0)
        inputs = replace(inputs, compute_seconds=factor * inputs.compute_seconds)
        trial, cause = verdict(inputs)
        assert cause == ""
        assert trial is not None
        assert trial.worse == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_without_a_measurement_there_is_no_verdict(seconds: float) -> None:
    inputs, _ = on_trial(seconds)
    assert verdict(inputs) == (inputs.history.trial, "")


def test_a_young_plan_is_not_judged_and_another_one_is_not_on_trial() -> None:
    inputs, _ = on_trial(100.0)
    assert verdict(replace(inputs, steps_since_switch=19)) == (inputs.history.trial, "")
    other = replace(inputs, current=scenario.plan(inputs.layout, (BF16,) * 3))
    assert verdict(other) == (None, "")
    moved = replace(inputs, history=replace(inputs.history, layout="another"))
    assert verdict(moved) == (None, "")


def test_a_switch_that_was_not_for_its_cost_is_not_on_trial() -> None:
    inputs = scenario.inputs(mbit=MBIT, current=DENSE, step_seconds=2.0)
    space = Space(inputs, LINK)
    old = space.present()
    k = space.add(TOPK)
    assert old is not None
    assert k is not None
    new = space.evaluate(np.full((1, 3), k, dtype=np.intp))
    made = begin(inputs, (DENSE,) * 3, (TOPK,) * 3, old, new, 0)
    assert made is not None
    assert (made.left, made.to, made.left_seconds) == ((DENSE,), (TOPK,), 2.0)
    assert expand(made.left, inputs) == (DENSE,) * 3
    assert begin(inputs, (TOPK,) * 3, (TOPK,) * 3, new, old, 0) is None  # costs more
    assert begin(inputs, (DENSE,) * 3, (BF16,) * 3, old, new, 0) is None  # is safe
    assert begin(inputs, (), (TOPK,) * 3, old, new, 0) is None  # nobody knows what was left


@pytest.mark.parametrize(
    ("before", "since", "risen"),
    [
        ((2.0, 1.9, 2.1, 2.0), (2.5, 2.6, 2.4, 2.5), True),
        ((2.0, 1.9, 2.1, 2.0), (2.1, 2.2, 2.0, 2.1), False),
        ((2.0, 1.2, 2.8, 2.0), (2.5, 2.6, 2.4, 2.5), False),  # within its noise
        ((2.0, 1.9, 2.1, 2.0), (2.5, 2.6, 1.9, 2.5), False),
        ((2.0, 1.9, 2.1, 2.0), (math.inf,) * 4, True),
        ((2.0, 1.9, 2.1, math.inf), (9.0,) * 4, False),  # it was lost before
        ((2.0, 2.0, 2.0), (9.0,) * 4, False),
        ((-1.0, -1.1, -0.9, -1.0), (0.5, 0.6, 0.7, 0.5), True),
    ],
)
def test_a_loss_rises_beyond_its_noise(
    before: tuple[float, ...], since: tuple[float, ...], risen: bool
) -> None:
    assert bool(_risen(before, since[:-1], since[-1])) is risen


# --- jobs ----------------------------------------------------------------------------------------


class Job:
    """Decisions in a row about a job; every 50 steps one, step times as ``truth`` says.

    Args:
        truth: Step time under an option, seconds; of what the models predict.
        loss: Loss under an option at a look.
    """

    def __init__(
        self,
        truth: Callable[[Option, float], float],
        loss: Callable[[Option, int], float] = lambda option, look: math.nan,
    ) -> None:
        self.truth, self.loss = truth, loss
        self.base = scenario.inputs(mbit=MBIT, current=DENSE, steps_since_switch=0)
        self.option, self.since, self.look = DENSE, 0, 0
        self.switches: list[tuple[int, Option, str]] = []

    def run(self, looks: int, **fields: object) -> Outcome:
        base = replace(self.base, **fields)  # type: ignore[arg-type]
        for _ in range(looks):
            self.look += 1
            step = 50 * self.look
            inputs = replace(
                base,
                step=step,
                current=scenario.plan(base.layout, (self.option,) * 3),
                steps_since_switch=step - self.since,
                history=self.base.history,
                link=self.base.link,
                loss=self.loss(self.option, self.look),
            )
            present = Space(inputs, LINK).present()
            assert present is not None
            seconds = self.truth(self.option, float(present.step_seconds[0]))
            outcome = decide(replace(inputs, step_seconds=seconds))
            assert outcome.history is not None
            self.base = replace(self.base, history=outcome.history, link=outcome.link)
            if outcome.outcome == "switch":
                self.option, self.since = outcome.options[0], step
                self.switches.append((step, self.option, outcome.undone))
        return outcome


def crawling(option: Option, predicted: float) -> float:
    """Compression takes ten times as long as it was predicted to, for what nothing measured."""
    return predicted if option in (DENSE, BF16) else 10 * predicted


def test_a_plan_that_costs_more_is_undone_and_not_tried_again_soon() -> None:
    job = Job(crawling)
    job.run(40)
    first, back = job.switches[:2]
    assert first[1].ratio < 1
    assert back[1:] == (DENSE, "cost")
    assert back[0] - first[0] <= 2 * 50  # two looks after it came into force
    tried = [(step, option) for step, option, undone in job.switches if not undone]
    bold = [(step, option) for step, option in tried if option.ratio < 1]
    families = [option.family for _, option in bold]
    assert len(bold) <= 2 * len(set(families)) + 4  # in 2000 steps
    share = sum(
        after[0] - before[0]
        for before, after in zip(job.switches, job.switches[1:], strict=False)
        if before[1].ratio < 1
    )
    assert share <= 0.3 * 2000  # most of the time it is spared


def test_the_reason_says_what_was_undone_and_what_is_not_chosen() -> None:
    job = Job(crawling)
    job.run(1)
    tried = job.option
    while not (job.switches and job.switches[-1][2]):
        outcome = job.run(1)
    assert outcome.undone == "cost"
    for word in (
        "undone: it costs",
        "the plan before it",
        f"{tried.label} is black-listed for 1000",
    ):
        assert word in outcome.reason


def test_a_plan_that_keeps_its_promise_stays() -> None:
    job = Job(lambda option, predicted: predicted)
    job.run(20)
    assert [undone for _, _, undone in job.switches] == [""]
    trial = job.base.history.trial
    assert trial is None or trial.fine >= 2
    job.run(LOSS_STEPS // 50 + 2)
    assert job.base.history.trial is None


def test_a_network_that_gets_slower_during_the_trial_undoes_nothing() -> None:
    job = Job(lambda option, predicted: predicted)
    job.run(1)
    slow = scenario.operations(1e-3, 8e-6 / 40, 8, repeats=20, age=0.5)
    job.run(6, operations=slow)
    assert not [undone for _, _, undone in job.switches if undone]


def test_a_loss_that_rises_under_compression_is_undone() -> None:
    def loss(option: Option, look: int) -> float:
        return (2.0 if option == DENSE else 3.0) + 0.01 * (look % 5)

    job = Job(lambda option, predicted: predicted, loss)
    job.base = replace(job.base, settings=replace(job.base.settings, dwell_steps=400))
    job.run(30)
    undone = [(option, why) for _, option, why in job.switches if why]
    assert undone
    assert undone[0] == (DENSE, "loss")

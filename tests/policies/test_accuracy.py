from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.policies import accuracy
from gradpilot.policies.accuracy import ENOUGH, LEAST, MOST_ERRORS, SHARE
from gradpilot.policies.adaptive import Adaptive
from gradpilot.policies.base import Inputs
from gradpilot.policies.history import History, StepError, StepForecast
from gradpilot.policies.options import current_options
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import BF16, DENSE, Option
from tests.policies import scenario

TOPK = Option("topk", 0.01, "allgather")


def known(forecast: StepForecast | None, of: Inputs, **fields: object) -> Inputs:
    """Return inputs of a later look that know a forecast."""
    history = replace(of.history, layout=of.layout.digest, forecast=forecast)
    return replace(of, history=history, **{"step": of.step + 50, **fields})  # type: ignore[arg-type]


def look(inputs: Inputs, *, doubt: bool = False) -> History:
    return accuracy.next_errors(inputs, current_options(inputs), doubt=doubt)


def errors(ratios: list[float], label: str = "a", **fields: object) -> list[StepError]:
    values = {"compressor": "c", "untried": False, "step": 0, **fields}
    return [StepError(label, ratio=ratio, **values) for ratio in ratios]  # type: ignore[arg-type]


def test_a_forecast_is_compared_at_the_next_look() -> None:
    now = scenario.inputs(current=BF16)
    after = look(known(StepForecast((BF16,), 0.2, False, now.step), now, step_seconds=0.25))
    assert after.errors == (StepError("bf16 native", "bf16", 1.25, False, now.step + 50),)
    assert after.forecast is None
    assert from_json(History, to_json(after)) == after


def test_one_of_a_new_plan_waits_until_the_plan_has_settled() -> None:
    now = scenario.inputs(current=TOPK)
    made = StepForecast((TOPK,), 0.2, True, now.step)
    young = known(made, now, step_seconds=0.3, steps_since_switch=19)
    assert look(young).forecast == made
    assert accuracy.forecast(young, look(young), (TOPK,), 0.5, untried=False).forecast == made
    settled = look(replace(young, steps_since_switch=20))
    assert [e.ratio for e in settled.errors] == pytest.approx([1.5])
    assert settled.errors[0].untried


@pytest.mark.parametrize(
    "fields",
    [
        {"step_seconds": 0.0},
        {"step_seconds": math.nan},
        {"step_seconds": 0.2, "current": None},
        {"step_seconds": 0.2, "current": scenario.plan(scenario.inputs().layout, (DENSE,) * 3)},
    ],
    ids=["unknown", "nan", "no plan", "another plan"],
)
def test_nothing_is_learned_from_what_cannot_be_compared(fields: dict[str, object]) -> None:
    now = scenario.inputs(current=BF16)
    after = look(known(StepForecast((BF16,), 0.2, False, now.step), now, **fields))
    assert after.errors == ()
    assert after.forecast is None


def test_odd_numbers_are_not_compared() -> None:
    now = scenario.inputs(current=BF16)
    made = StepForecast((BF16,), 0.2, False, now.step)
    asked = known(made, now, step_seconds=9.0)
    assert look(asked, doubt=True) == asked.history
    assert look(replace(asked, step=now.step)).errors == ()  # no step since


def test_memory_is_bounded_and_tries_are_not_pushed_out() -> None:
    now = scenario.inputs(current=BF16)
    history = History(errors=tuple(errors([2.0] * 3, untried=True)))
    for i in range(2 * MOST_ERRORS):
        now = replace(now, step=now.step + 50, step_seconds=0.2)
        made = StepForecast((BF16,), 0.2, False, now.step - 50)
        history = replace(history, layout=now.layout.digest, forecast=made)
        history = look(replace(now, history=history))
        assert sum(e.untried for e in history.errors) == 3
        assert len(history.errors) == 3 + min(i + 1, MOST_ERRORS)
    steps = [e.step for e in history.errors]
    assert steps == sorted(steps)
    assert history.errors[-1].step == now.step


def test_an_interval_comes_from_the_plan_its_compressor_or_all() -> None:
    one, other = errors([1.1] * ENOUGH, "bf16 native", compressor="bf16"), errors([2.0] * ENOUGH)
    related = errors([1.5] * ENOUGH, "bf16 ring", compressor="bf16")

    def of(*pools: list[StepError]) -> str:
        found = accuracy.interval([e for p in pools for e in p], (BF16,), untried=False)
        return found.of if found is not None else ""

    assert of(one, related, other) == "bf16 native in use"
    assert of(one[1:], related, other) == "plans with bf16 in use"
    assert of(one[10:], related[10:], other) == "plans in use"
    assert of(one[: LEAST - 1]) == ""
    assert accuracy.interval(one, (BF16,), untried=True) is None


def test_few_looks_give_their_range_and_a_lower_share() -> None:
    found = accuracy.interval(errors([1.2, 0.9, 1.0]), (BF16,), untried=False)
    assert found is not None
    assert (found.low, found.high, found.share) == pytest.approx((0.9, 1.2, 0.5))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=LEAST, max_size=MOST_ERRORS))
def test_an_interval_holds_the_share_that_it_names_of_its_own_looks(ratios: list[float]) -> None:
    found = accuracy.interval(errors(ratios), (BF16,), untried=False)
    assert found is not None
    inside = sum(found.low <= ratio <= found.high for ratio in ratios)
    assert inside / len(ratios) >= found.share - 1e-9
    assert (found.share >= SHARE - 1e-9) == (len(ratios) >= ENOUGH)


@pytest.mark.parametrize("count", [5, ENOUGH, MOST_ERRORS])
def test_the_next_look_lies_inside_as_often_as_stated(count: int) -> None:
    """Whatever the distribution: here a skewed one, 2,000 times."""
    rng = np.random.default_rng(count)
    drawn = np.exp(rng.gamma(0.7, 0.2, (2000, count + 1)))
    inside, share = 0, 0.0
    for row in drawn:
        found = accuracy.interval(errors(row[:-1].tolist()), (BF16,), untried=False)
        assert found is not None
        inside += found.low <= row[-1] <= found.high
        share = found.share
    # Four standard deviations of the count.
    assert inside / 2000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 2000))


def test_the_policy_compares_tells_and_forecasts_anew() -> None:
    history = replace(
        scenario.inputs().history,
        layout=scenario.inputs().layout.digest,
        forecast=StepForecast((BF16,), 0.5, False, 950),
        errors=tuple(errors([0.9, 1.1], "bf16 native", compressor="bf16")),
    )
    now = scenario.inputs(current=BF16, step_seconds=0.1, history=history, mbit=10_000)
    outcome = Adaptive().decide(now)
    assert outcome.history is not None
    assert outcome.explanation is not None
    assert [e.ratio for e in outcome.history.errors] == [0.9, 1.1, pytest.approx(0.2)]
    made = outcome.history.forecast
    assert made is not None
    wanted = outcome.options or current_options(now)
    assert made.options == (wanted[0],)
    predicted = outcome.chosen if outcome.outcome == "switch" else outcome.current
    assert predicted is not None
    assert made.seconds == predicted.step_seconds
    assert made.untried == (outcome.outcome == "switch")
    if outcome.outcome == "keep":
        assert outcome.explanation.interval is not None
        assert "3 looks at plans in use" in outcome.reason

from __future__ import annotations

from dataclasses import replace

import pytest

from gradpilot.policies.base import Inputs
from gradpilot.policies.residuals import GROWING_LOOKS, Finding, watch
from gradpilot.policies.watches import ResidualTrend
from gradpilot.protos.messages import BF16, DENSE, Option
from tests.policies import scenario

TOPK = Option("topk", 0.01, "allgather")
SIZES = (1_000_000, 1_000_000, 500_000)


def measured(ratios: tuple[float, ...], trend: ResidualTrend, inside: bool = True) -> Inputs:
    """Residuals in units of each bucket's gradient; measured gradients hold them or do not."""
    base = scenario.inputs(current=TOPK)
    states = tuple(
        replace(s, residual_sq=r * n, gradient_sq=n * (1 + r) if inside else n)
        for s, r, n in zip(base.buckets, ratios, SIZES, strict=True)
    )
    history = replace(base.history, residuals=trend, layout=base.layout.digest)
    return replace(base, buckets=states, history=history)


def look(trend: ResidualTrend, *ratios: float, young: bool = False, inside: bool = True) -> Finding:
    three = ratios if len(ratios) == 3 else ratios * 3
    return watch(measured(three, trend, inside), (TOPK,), rebase=young)


def reference() -> ResidualTrend:
    return watch(scenario.inputs(current=DENSE), (DENSE,), rebase=False).trend


def test_the_gradient_of_a_plan_that_sends_everything_is_the_measure() -> None:
    assert reference().gradient_sq == tuple(float(n) for n in SIZES)
    # While a residual is still being sent, what is measured is no gradient.
    dirty = measured((0.5, 0.5, 0.5), reference())
    assert watch(dirty, (BF16,), rebase=False).trend.gradient_sq == reference().gradient_sq


@pytest.mark.parametrize(("ratio", "bad"), [(0.7, False), (20.0, False), (31.0, True), (4e6, True)])
def test_beyond_the_limit_the_plan_must_go_at_once(ratio: float, bad: bool) -> None:
    found = look(reference(), ratio)
    assert bool(found.alarm) is bad
    assert not bad or f"{ratio:.3g} times the gradient" in found.alarm


def test_without_a_reference_only_growth_tells() -> None:
    trend = ResidualTrend()
    for ratio in (50.0, 51.0):
        found = look(trend, ratio)
        assert not found.alarm  # 50 of 51 is residual; no gradient is known to compare it with
        trend = found.trend


def test_a_number_that_cannot_be_must_be_seen_twice() -> None:
    first = look(reference(), 1e9, inside=False)
    assert not first.alarm
    assert look(first.trend, 2e9, inside=False).alarm


def test_one_heavy_bucket_is_enough_and_a_light_one_is_not() -> None:
    assert "in a bucket" in look(reference(), 40.0, 0.1, 0.1).alarm
    small = replace(reference(), gradient_sq=(1e3, 1e6, 5e5))
    base = measured((0.0, 0.1, 0.1), small)
    states = (replace(base.buckets[0], residual_sq=1e5, gradient_sq=1.01e5), *base.buckets[1:])
    assert not watch(replace(base, buckets=states), (TOPK,), rebase=False).alarm


def test_steady_growth_is_an_alarm_below_the_limit() -> None:
    trend, alarms = look(reference(), 1.1).trend, []
    for number in range(1, GROWING_LOOKS + 1):
        found = look(trend, 1.1 * 2.0**number)
        trend = found.trend
        alarms.append(bool(found.alarm))
    assert alarms == [False] * (GROWING_LOOKS - 1) + [True]


def test_build_up_after_a_switch_and_repeated_measurements_are_no_growth() -> None:
    trend = reference()
    for number in range(8):
        found = look(trend, 0.1 * 2.0**number, young=True)
        assert not found.alarm
        trend = found.trend
    again = look(trend, trend.last)
    assert again.trend == trend


def test_a_residual_that_settles_raises_no_alarm() -> None:
    trend = reference()
    for number in range(40):
        found = look(trend, 9.0 * (1 - 0.8 ** (number + 1)))
        assert not found.alarm, number
        trend = found.trend


def test_gradients_that_grew_since_are_known_by_what_a_step_sends() -> None:
    # 60 times the gradient of the last dense plan, but a step sends three times what waits.
    inputs = measured((60.0, 60.0, 60.0), reference())
    grown = tuple(
        replace(s, gain=0.75, gradient_sq=240.0 * n)
        for s, n in zip(inputs.buckets, SIZES, strict=True)
    )
    assert not watch(replace(inputs, buckets=grown), (TOPK,), rebase=False).alarm
    # A step that sends next to nothing of it is no excuse.
    stuck = tuple(replace(s, gain=0.02) for s in inputs.buckets)
    assert watch(replace(inputs, buckets=stuck), (TOPK,), rebase=False).alarm

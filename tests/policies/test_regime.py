from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gradpilot.policies.base import Inputs
from gradpilot.policies.regime import LOSSES, next_regime, tell, total_gain
from gradpilot.policies.watches import Regime
from gradpilot.warm_up import CALM_LOOKS, Warmth
from tests.policies import scenario


def seen(before: Regime, *, gain: float = -1.0, **fields: object) -> Inputs:
    base = scenario.inputs(**fields)  # type: ignore[arg-type]
    states = tuple(replace(b, gain=gain) for b in base.buckets)
    return replace(base, buckets=states, history=replace(base.history, regime=before))


def test_a_step_of_the_learning_rate_is_a_shock_and_a_slope_is_not() -> None:
    regime, shock = next_regime(seen(Regime(), lr=0.1), rebase=False)
    assert (regime.lr, shock) == (0.1, "")
    for lr in (0.09, 0.07, math.nan):
        regime, shock = next_regime(seen(regime, lr=lr), rebase=False)
        assert shock == ""
    assert regime.lr == 0.07
    for lr, before in ((0.007, 0.07), (0.1, 0.007)):
        regime, shock = next_regime(seen(regime, lr=lr), rebase=False)
        assert shock == f"the learning rate went from {before} to {lr}"


def test_a_gain_that_moved_for_good_is_a_shock_and_noise_is_not() -> None:
    regime = Regime(gain=0.8)
    for gain in (0.75, 0.86, 0.65, 0.78, 0.9, 0.8):
        regime, shock = next_regime(seen(regime, gain=gain), rebase=False)
        assert shock == "", gain
    regime, shock = next_regime(seen(regime, gain=0.5), rebase=False)
    assert shock == ""
    regime, shock = next_regime(seen(regime, gain=0.5), rebase=False)
    assert "the gain went from" in shock
    regime, shock = next_regime(seen(regime, gain=0.5), rebase=False)
    assert (regime.gain, shock) == (0.5, "")


def test_a_young_plan_sets_the_gain_anew() -> None:
    regime, shock = next_regime(seen(Regime(gain=1.0, apart=1), gain=0.4), rebase=True)
    assert (regime.gain, regime.apart, shock) == (0.4, 0, "")
    kept, _ = next_regime(seen(regime, gain=-1.0), rebase=False)
    assert kept.gain == 0.4


def test_total_gain_is_weighted_and_needs_a_measurement() -> None:
    base = scenario.inputs(sizes=(3_000_000, 1_000_000))
    states = (replace(base.buckets[0], gain=0.2), replace(base.buckets[1], gain=0.6))
    assert total_gain(replace(base, buckets=states)) == pytest.approx(0.3)
    for bad in (math.nan, math.inf, 0.0, -1.0):
        assert total_gain(seen(Regime(), gain=bad)) == -1.0


def test_losses_are_those_that_differ_under_the_plan() -> None:
    regime = Regime()
    for loss in (3.0, 3.0, math.nan, 2.0, math.inf, math.inf):
        regime, _ = next_regime(seen(regime, loss=loss), rebase=False)
    assert regime.losses == (3.0, 2.0, math.inf, math.inf)
    for number in range(2 * LOSSES):
        regime, _ = next_regime(seen(regime, loss=float(number)), rebase=False)
    assert len(regime.losses) == LOSSES
    regime, _ = next_regime(seen(regime, loss=0.5), rebase=True)
    assert regime.losses == (0.5,)


def test_people_are_told_of_a_tightened_floor() -> None:
    assert "warm-up, gain floor 0.7" in tell(Warmth(), 0.7)[0]
    critical = tell(Warmth(critical="the learning rate went from 1 to 0.1"), 0.7)
    assert critical == ["critical phase, gain floor 0.7: the learning rate went from 1 to 0.1"]
    assert "on its way down" in tell(Warmth(warm=True, ramp=1), 0.5)[0]
    assert tell(Warmth(calm=CALM_LOOKS), 0.3) == []

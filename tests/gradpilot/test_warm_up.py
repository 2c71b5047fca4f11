from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.warm_up import CALM_LOOKS, RAMP_LOOKS, STABLE_LOOKS, Warmth, next_warmth


def after(values: list[float], start: Warmth | None = None) -> Warmth:
    state = start or Warmth()
    for number, value in enumerate(values):
        state = next_warmth(state, (value,), number)
    return state


def test_a_stable_run_gets_warm_after_a_few_looks_and_not_before() -> None:
    assert not after([1.0] * STABLE_LOOKS).warm  # the first look has nothing to compare with
    state = after([1.0] * (STABLE_LOOKS + 1))
    assert state.warm
    assert state.since_step == STABLE_LOOKS


def test_a_falling_norm_keeps_it_cold() -> None:
    assert not after([0.7**i for i in range(30)]).warm


def test_a_small_change_starts_the_count_over_but_keeps_a_warm_run_warm() -> None:
    assert not after([1.0, 1.0, 1.0, 1.3, 1.3]).warm
    warm = after([1.0] * 5)
    assert next_warmth(warm, (1.3,), 9).warm


@pytest.mark.parametrize("value", [3.0, 0.4])
def test_a_critical_change_makes_it_cold_again(value: float) -> None:
    cold = next_warmth(after([1.0] * 5), (value,), 77)
    assert not cold.warm
    assert cold.since_step == 77
    assert after([value] * 8, cold).warm


def test_every_value_must_be_stable() -> None:
    state = Warmth()
    for number in range(20):
        state = next_warmth(state, (1.0, 0.7**number), number)
    assert not state.warm


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_nothing_is_learned_from_what_is_unknown(value: float) -> None:
    warm = after([1.0] * 5)
    assert next_warmth(warm, (value,), 9) is warm
    assert next_warmth(warm, (), 9) is warm


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(0, 1e12), max_size=20))
def test_any_history_gives_a_state(values: list[float]) -> None:
    state = after(values)
    assert state.looks == len(values)
    assert all(math.isfinite(average) for average in state.averages)


# --- the floor of gain ---------------------------------------------------------------------------


def test_the_floor_comes_down_in_a_few_looks_once_the_run_is_settled() -> None:
    floors = [after([1.0] * looks).floor(0.3, 0.7) for looks in range(8)]
    assert floors[: STABLE_LOOKS + 1] == [0.7] * (STABLE_LOOKS + 1)
    assert floors[STABLE_LOOKS + 1] == pytest.approx(0.5)
    assert floors[STABLE_LOOKS + 2 :] == [0.3] * 3


def test_a_floor_below_the_operators_changes_nothing() -> None:
    assert Warmth().floor(0.5, 0.2) == 0.5


def test_noise_does_not_keep_the_floor_up_for_ever() -> None:
    wavering = [1.0 + 0.3 * (-1) ** i for i in range(CALM_LOOKS + RAMP_LOOKS + 1)]
    state = after(wavering)
    assert not state.warm
    assert state.settled
    assert state.floor(0.3, 0.7) == 0.3
    assert not after(wavering[:CALM_LOOKS]).settled


def test_one_spike_is_no_critical_phase_and_a_change_that_stays_is_one() -> None:
    calm = after([1.0] * 20)
    spike = next_warmth(calm, (5.0,), 20)
    assert (spike.warm, spike.critical) == (False, "")
    assert spike.floor(0.3, 0.7) == 0.3
    assert next_warmth(spike, (1.0,), 21).averages == (1.0,)
    stays = next_warmth(spike, (5.0,), 21)
    assert "changed by 80 %" in stays.critical
    assert stays.floor(0.3, 0.7) == 0.7
    settled = after([5.0] * (STABLE_LOOKS + RAMP_LOOKS), stays)
    assert (settled.critical, settled.floor(0.3, 0.7)) == ("", 0.3)


def test_a_shock_makes_a_settled_run_critical_and_a_young_one_just_young() -> None:
    assert next_warmth(after([1.0] * 5), (1.0,), 9, shock="rate").critical == "rate"
    assert next_warmth(after([1.0] * 5), (-1.0,), 9, shock="rate").critical == "rate"
    assert next_warmth(Warmth(), (1.0,), 9, shock="rate").critical == ""


def test_what_we_did_ourselves_is_no_change() -> None:
    warm = after([1.0] * 5)
    moved = next_warmth(warm, (9.0,), 9, rebase=True)
    assert (moved.warm, moved.critical, moved.averages) == (True, "", (9.0,))
    assert next_warmth(moved, (9.0, 0.5), 10).warm  # noise is known from now on

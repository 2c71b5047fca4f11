from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.policies.warm_up import STABLE_LOOKS, Warmth, next_warmth


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

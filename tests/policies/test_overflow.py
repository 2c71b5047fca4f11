from __future__ import annotations

from collections.abc import Iterable

import pytest

from gradpilot.policies.overflow import BASELINE_STEPS, LOOKS, alarm, innocent, next_overflow, tell
from gradpilot.policies.watches import Overflow
from gradpilot.protos.messages import BF16, DENSE, Option

TOPK = Option("topk", 0.01, "allgather")
Plan = tuple[Option, ...]


def after(
    counts: Iterable[int], plan: Plan, start: Overflow | None = None, step: int = 0, left: Plan = ()
) -> Overflow:
    """One look every 10 steps; at the first one the plan may have changed from ``left``."""
    state = start or Overflow()
    for number, count in enumerate(counts):
        state = next_overflow(state, count, step + 10 * number, plan, left if number == 0 else ())
    return state


@pytest.mark.parametrize("plan", [(TOPK,), (BF16,), (Option(collective="ring", skip=2),)])
def test_overflows_at_looks_in_a_row_condemn_a_plan(plan: Plan) -> None:
    assert alarm(after([0, 1, 2], plan), 20, plan) == ""
    state = after([0, 1, 2, 3], plan)
    assert (state.looks, state.steps) == (LOOKS, 3)
    assert "3 steps with non-finite gradients" in alarm(state, 30, plan)


def test_many_condemn_it_sooner() -> None:
    assert alarm(after([0, 10_000], (TOPK,)), 10, (TOPK,)) == ""
    assert alarm(after([0, 5, 10], (TOPK,)), 20, (TOPK,))


def test_now_and_then_is_a_loss_scaler() -> None:
    counts = [0, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    state = Overflow()
    for number, count in enumerate(counts):
        state = next_overflow(state, count, number, (TOPK,), ())
        assert alarm(state, number, (TOPK,)) == ""


def test_dense_is_never_condemned_and_says_so() -> None:
    state = after([0, 1, 2, 3, 4], (DENSE,))
    assert alarm(state, 40, (DENSE,)) == ""
    assert "model's own" in tell(state, 40, (DENSE,))[0]
    assert tell(after([4, 4], (DENSE,)), 10, (DENSE,)) == []


def test_what_came_under_dense_before_is_not_the_plans() -> None:
    model = after([0, 1, 2, 3], (DENSE,))
    state = after([5, 6, 7, 8], (TOPK,), model, 40, (DENSE,))
    assert state.looks == LOOKS
    assert alarm(state, 70, (TOPK,)) == ""
    assert innocent(state, 70, (TOPK,))
    assert tell(state, 70, (TOPK,))
    # Long ago does not count.
    assert alarm(state, 100 + BASELINE_STEPS, (TOPK,))


def test_overflows_at_the_last_look_before_the_switch_are_not_the_plans() -> None:
    model = after([0, 0, 1], (BF16,))
    state = after([2, 3, 4, 5], (TOPK,), model, 30, (BF16,))
    assert alarm(state, 60, (TOPK,)) == ""


def test_bf16_does_not_excuse_itself_but_excuses_compression() -> None:
    whole = after([0, 1, 2, 3], (BF16,))
    assert alarm(whole, 30, (BF16,))
    assert innocent(whole, 30, (TOPK,))
    assert not innocent(whole, 30, (BF16,))


def test_what_comes_on_the_way_to_a_plan_is_nobodys() -> None:
    state = after([0, 0], (DENSE,))
    state = after([50, 51, 51], (TOPK,), state, 20, (DENSE,))
    assert (state.looks, state.steps) == (0, 0)
    assert state.whole_step == -1


@pytest.mark.parametrize("count", [-1, 0])
def test_an_unknown_or_smaller_count_teaches_nothing(count: int) -> None:
    state = after([5, 6, 7], (TOPK,))
    later = next_overflow(state, count, 30, (TOPK,), ())
    assert later.looks in (state.looks, 0)
    assert alarm(later, 30, (TOPK,)) == ""
    assert later.whole_step == state.whole_step

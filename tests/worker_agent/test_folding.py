from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.errors import ConfigError
from gradpilot.worker_agent.folding import fold


def state(rank: int, world_size: int, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    held = {
        name: torch.randn(5, generator=generator, dtype=torch.float64).round(decimals=3)
        for name in ("a", "b")
    }
    values = {"world_size": world_size, "rank": rank, "step": 9, "loss_scale": 1.0}
    return {**values, "residuals": held, **changes}


def total(residuals: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    return torch.stack([r.get(name, torch.zeros(5).double()) for r in residuals]).sum(0)


@settings(max_examples=40, deadline=None)
@given(old=st.integers(1, 9), new=st.integers(1, 9), order=st.randoms())
def test_the_sum_over_ranks_is_kept(old: int, new: int, order: Any) -> None:
    states = [state(rank, old) for rank in range(old)]
    order.shuffle(states)
    folded = [fold(states, rank, new) for rank in range(new)]
    assert all(f.missing == () and f.dropped == 0 for f in folded)
    for name in ("a", "b"):
        before = total([s["residuals"] for s in states], name)
        after = total([f.residuals for f in folded], name)
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def test_growing_changes_no_bit() -> None:
    states = [state(rank, 2) for rank in range(2)]
    folded = [fold(states, rank, 4).residuals for rank in range(4)]
    for rank in range(2):
        for name, residual in states[rank]["residuals"].items():
            assert torch.equal(folded[rank][name], residual)
    assert folded[2:] == [{}, {}]


def test_of_some_ranks_all_is_dropped_and_counted_once() -> None:
    states = [state(rank, 4) for rank in (0, 1, 3)]
    folded = [fold(states, rank, 2) for rank in range(2)]
    assert [f.missing for f in folded] == [(2,), (2,)]
    assert [f.residuals for f in folded] == [{}, {}]
    assert sum(f.dropped for f in folded) == 3 * 2


def test_a_rank_without_a_residual_is_not_missing() -> None:
    states = [state(0, 2), state(1, 2, residuals={})]
    folded = fold(states, 0, 1)
    assert folded.missing == ()
    assert torch.equal(folded.residuals["a"], states[0]["residuals"]["a"])


def test_residuals_of_another_loss_scale_are_brought_to_the_first_ones() -> None:
    states = [state(0, 2, loss_scale=4.0), state(1, 2, loss_scale=2.0)]
    a, b = (s["residuals"]["a"] for s in states)
    torch.testing.assert_close(fold(states, 0, 1).residuals["a"], a + 2 * b)


def test_sixteen_bits_keep_their_dtype_and_range() -> None:
    big = {"a": torch.full((2,), 60_000.0, dtype=torch.float16)}
    folded = fold([state(r, 2, residuals=big) for r in range(2)], 0, 1).residuals["a"]
    assert folded.dtype == torch.float16
    assert folded.tolist() == [65504.0, 65504.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": 8}, "one step"),
        ({"world_size": 3}, "one world_size"),
        ({"rank": 0}, "of one rank"),
    ],
)
def test_states_of_different_checkpoints_are_refused(change: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fold([state(0, 2), {**state(1, 2), **change}], 0, 1)

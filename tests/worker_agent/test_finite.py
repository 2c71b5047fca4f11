"""Finite or not, and NaN everywhere if not."""

from __future__ import annotations

import pytest
import torch

from gradpilot.worker_agent.finite import is_finite, poison_

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_values_whose_sum_overflows_are_finite_and_stay(dtype: torch.dtype) -> None:
    large = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
    before = large.clone()
    assert is_finite(large)
    poison_(large)
    assert torch.equal(large, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_odd_element_spoils_all(dtype: torch.dtype, value: float) -> None:
    vector = torch.ones(9, dtype=dtype)
    vector[4] = value
    assert not is_finite(vector)
    poison_(vector)
    assert bool(vector.isnan().all())


def test_infinities_that_cancel_are_seen() -> None:
    assert not is_finite(torch.tensor([float("inf"), float("-inf"), 1.0]))

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.worker_agent.compressors import _magnitudes
from gradpilot.worker_agent.compressors._magnitudes import (
    above,
    least_positive,
    mean_and_largest,
    sampled,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(
    n=st.integers(1, 100),
    seed=st.integers(0, 9),
    share=st.floats(0.0, 1.0),
    piece=st.sampled_from([8, 16, 64, 1024]),
    dtype=st.sampled_from(DTYPES),
)
@settings(deadline=None, max_examples=200)
def test_above_finds_what_a_comparison_of_all_does(
    n: int, seed: int, share: float, piece: int, dtype: torch.dtype
) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    threshold = float(x.abs().double().quantile(share))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_magnitudes, "_PIECE", piece)
        found = above(x, threshold)
        mean, most = mean_and_largest(x)
    assert found.dtype == torch.int64
    assert torch.equal(found, (x.abs().float() >= threshold).nonzero().view(-1)) or (
        dtype == torch.float64 and torch.equal(found, (x.abs() >= threshold).nonzero().view(-1))
    )
    assert mean == pytest.approx(float(x.double().abs().mean()), rel=1e-6)
    assert most == float(x.abs().max())


@pytest.mark.parametrize("hits", [[], [0], [7, 8, 299_999], list(range(0, 300_000, 2))])
def test_few_and_many_hits(hits: list[int]) -> None:
    x = torch.full((300_000,), 0.1)
    x[hits] = -1.0
    assert above(x, 0.5).tolist() == hits


def test_what_is_not_a_number_is_above_everything() -> None:
    x = torch.tensor([0.0, math.nan, -math.inf, 1.0])
    assert above(x, 2.0).tolist() == [1, 2]
    assert above(x, math.inf).tolist() == [1, 2]
    assert above(x, math.nan).tolist() == [0, 1, 2, 3]
    assert not math.isfinite(mean_and_largest(x)[0])


def test_a_threshold_beyond_the_range_is_reached_by_little() -> None:
    assert above(torch.tensor([1.0, 1e38]), 1e60).tolist() == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_least_positive_spares_zeros_only(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.tensor([0.0, -0.0, tiny, -tiny], dtype=dtype)
    assert above(x, least_positive(x)).tolist() == [2, 3]


def test_a_sample_is_as_large_as_asked_for() -> None:
    x = torch.arange(100_000.0)
    assert sampled(x, 20_000).numel() == 100_000
    assert sampled(x, 9_000).tolist() == list(range(0, 100_000, 11))
    assert sampled(x, 1_000).tolist() == list(range(0, 100_000, 97))
    assert sampled(-x.bfloat16(), 1_000).dtype == torch.float32
    assert sampled(-x, 1_000).min() == 0.0

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.worker_agent.compressors import _blockwise
from gradpilot.worker_agent.compressors._blockwise import (
    block_count,
    peaks,
    pieces,
    scaled,
    scratch_for,
    sum_scaled,
    times_blocks,
)
from gradpilot.worker_agent.testing import gradients

CPU = torch.device("cpu")
SIZES = st.tuples(st.integers(1, 300), st.integers(1, 70))


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces even of short vectors, and blocks longer than a piece."""
    monkeypatch.setattr(_blockwise, "_PIECE", 64)


def per_element(factors: Tensor, block: int, n: int) -> Tensor:
    return factors.repeat_interleave(block, dim=-1)[..., :n]


@given(SIZES)
@settings(deadline=None, max_examples=60)
def test_pieces_are_rows_of_blocks_in_order(size: tuple[int, int]) -> None:
    n, block = size
    for device, shorter in ((CPU, 0), (CPU, n // 2), (torch.device("meta"), 0)):
        room = scratch_for(n, block, torch.empty(0, device=device)).numel()
        found = list(pieces(n - shorter, block, room))
        element = number = 0
        for where, blocks in found:
            assert (where.start, blocks.start) == (element, number)
            element, number = where.stop, blocks.stop
            rows, length = blocks.stop - blocks.start, where.stop - where.start
            assert length == rows * block or (rows == 1 and element == n - shorter)
            assert length <= room
        assert (element, number) == (n - shorter, block_count(n - shorter, block))
    # A device is given all whole blocks at once.
    assert len(found) <= 2
    assert list(pieces(0, block, 64)) == []


@given(SIZES, st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
@settings(deadline=None, max_examples=60)
def test_peaks_are_the_largest_magnitudes(size: tuple[int, int], dtype: torch.dtype) -> None:
    n, block = size
    x = gradients(n, 1, dtype=dtype)[0]
    expected = [float(x[at : at + block].abs().max()) for at in range(0, n, block)]
    assert peaks(x, block, torch.float64).tolist() == expected
    x[n // 2] = torch.nan
    assert peaks(x, block, dtype).isnan().nonzero().view(-1).tolist() == [n // 2 // block]


@given(SIZES, st.integers(1, 4), st.integers(0, 9), st.sampled_from(["float32", "float16"]))
@settings(deadline=None, max_examples=60)
def test_codes_are_scaled_and_added_up(
    size: tuple[int, int], ranks: int, more: int, dtype: str
) -> None:
    n, block = size
    generator = torch.Generator().manual_seed(n)
    # Messages may be longer than what is wanted of them.
    codes = torch.randint(-127, 128, (ranks, n + more), generator=generator, dtype=torch.int8)
    factors = torch.rand(ranks, block_count(n, block) + more, generator=generator)
    each = [c[:n] * per_element(f, block, n) for c, f in zip(codes, factors, strict=True)]

    found = torch.cat([part.clone() for _, part in scaled(codes[0, :n], factors[0], block)])
    assert torch.equal(found, each[0])
    assert torch.equal(times_blocks(codes[0, :n].float(), factors[0], block, 0, found), each[0])

    out = torch.full((n,), torch.nan, dtype=getattr(torch, dtype))
    assert sum_scaled(codes, factors, block, out) is out
    total = torch.stack(each).double().sum(0)
    # Each of N additions may round by half a unit of the largest partial sum.
    bound = ranks * 127 * ranks * torch.finfo(torch.float32).eps
    if dtype == "float16":
        bound += 127 * ranks * torch.finfo(torch.float16).eps
    assert float((out.double() - total).abs().max()) <= bound
    if ranks == 1:
        assert torch.equal(out, each[0].to(out.dtype))


def test_a_scale_that_is_nan_spoils_its_block_alone() -> None:
    codes = torch.zeros(2, 10, dtype=torch.int8)
    factors = torch.tensor([[1.0, 1.0, 1.0], [1.0, torch.nan, 1.0]])
    mean = sum_scaled(codes, factors, 4, torch.empty(10))
    assert mean.isnan().nonzero().view(-1).tolist() == [4, 5, 6, 7]

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.worker_agent.compressors.sent import (
    Pieces,
    Sent,
    Sparse,
    cut_length,
    cuts,
    dense_sent,
)
from gradpilot.worker_agent.testing import gradients


def pieces_of(vector: Tensor, bounds: list[int]) -> Pieces:
    """Return a vector in pieces that share their memory, as those of a decoder do."""
    room = torch.empty_like(vector)

    def make() -> Iterator[tuple[slice, Tensor]]:
        for start, stop in pairwise(bounds):
            yield slice(start, stop), room[: stop - start].copy_(vector[start:stop])

    return Pieces(make)


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 200),
    inner=st.lists(st.integers(0, 200), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_every_form_is_the_vector_that_it_stands_for(
    n: int, inner: list[int], dtype: torch.dtype, seed: int
) -> None:
    corrected, other = gradients(n, 2, seed=seed, dtype=dtype)
    indices = (other > 0).nonzero().view(-1)
    sparse = torch.zeros_like(other).index_copy_(0, indices, other[indices])
    bounds = sorted({0, n, *(min(b, n) for b in inner)})
    forms: list[tuple[Sent, Tensor]] = [
        (Sparse(indices, other[indices]), sparse),
        (Sparse(indices.int(), other[indices]), sparse),
        (pieces_of(other, bounds), other),
    ]
    for sent, vector in forms:
        for _ in range(2):  # it can be made again
            assert torch.equal(sent.subtract_from_(corrected.clone()), corrected - vector)
            dense = dense_sent(sent, corrected)
            assert dense.dtype == torch.promote_types(dtype, torch.float32)
            assert torch.equal(dense, vector.to(dense.dtype))
            exact = float(vector.double().square().sum())
            assert sent.squared_norm() == pytest.approx(exact, rel=1e-9)


def test_what_no_piece_covers_was_not_sent() -> None:
    vector = torch.arange(1.0, 7.0)
    sent = pieces_of(vector, [0, 2, 4])
    assert dense_sent(sent, vector).tolist() == [1, 2, 3, 4, 0, 0]


def test_none_is_all_and_a_tensor_is_itself() -> None:
    corrected, other = gradients(5, 2)
    assert dense_sent(None, corrected) is corrected
    assert dense_sent(other, corrected) is other


@pytest.mark.parametrize("n", [1, (1 << 17) - 1, 1 << 17, 300_001])
def test_cuts_cover_everything_in_order(n: int) -> None:
    found = list(cuts(n, torch.device("cpu")))
    ends = [0, *(cut.stop for cut in found)]
    assert [cut.start for cut in found] == ends[:-1]
    assert ends[-1] == n
    assert max(cut.stop - cut.start for cut in found) == cut_length(n, torch.device("cpu"))


def test_an_accelerator_gets_one_range() -> None:
    device = torch.device("meta")
    assert list(cuts(1 << 20, device)) == [slice(0, 1 << 20)]
    assert cut_length(1 << 20, device) == 1 << 20

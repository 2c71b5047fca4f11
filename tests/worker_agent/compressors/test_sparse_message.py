from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.worker_agent.collectives.base import AllGather
from gradpilot.worker_agent.compressors._sparse_message import (
    average_selected,
    average_unequal,
    pack,
    unpack,
)
from gradpilot.worker_agent.compressors.base import At
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.virtual import run_lockstep

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(k=st.integers(0, 40), n=st.integers(1, 5), dtype=st.sampled_from(DTYPES))
@settings(deadline=None, max_examples=60)
def test_messages_of_any_length_and_width_come_back(k: int, n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(k)
    values = torch.randn(n, k, generator=generator).to(dtype)
    indices = torch.randint(0, 2**31 - 1, (n, k), generator=generator)
    gathered = torch.stack([pack(v, i) for v, i in zip(values, indices, strict=True)])
    assert gathered.dtype == torch.uint8
    assert gathered.shape == (n, k * (dtype.itemsize + 4))
    if k:
        together = unpack(gathered, dtype)
        assert torch.equal(together[0], values)
        assert torch.equal(together[1], indices.int())
    for message, v, i in zip(gathered, values, indices, strict=True):
        got = unpack(message, dtype)
        assert torch.equal(got[0], v)
        assert torch.equal(got[1], i.int())


def test_fp32_is_read_in_place() -> None:
    gathered = torch.stack([pack(torch.randn(7), torch.arange(7)) for _ in range(3)])
    for message in (gathered, *gathered):
        for part in unpack(message, torch.float32):
            assert part.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()


def choose(grads: list[Tensor], counts: list[int]) -> list[Tensor]:
    return [g.abs().topk(c).indices.sort().values for g, c in zip(grads, counts, strict=True)]


@pytest.mark.parametrize("counts", [[5, 0, 17], [0, 0, 1], [0, 0, 0], [64, 64, 64]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_may_send_different_numbers_of_elements(
    counts: list[int], dtype: torch.dtype
) -> None:
    grads = [
        torch.randn(64, generator=torch.Generator().manual_seed(r)).to(dtype) for r in (1, 2, 3)
    ]
    chosen = choose(grads, counts)
    ats = [At(r, 3, 0) for r in range(3)]
    rounds = [average_unequal(g, i, at) for g, i, at in zip(grads, chosen, ats, strict=True)]
    estimates = run_lockstep(rounds, ats)
    expected = torch.zeros(64).double()
    for grad, indices in zip(grads, chosen, strict=True):
        expected[indices] += grad.double()[indices] / 3
    for estimate, indices in zip(estimates, chosen, strict=True):
        torch.testing.assert_close(estimate.mean, expected.to(dtype))
        assert torch.equal(estimate.mean, estimates[0].mean)
        assert isinstance(estimate.sent, Sparse)
        assert torch.equal(estimate.sent.indices, indices)


def test_equal_and_unequal_give_the_same_bits() -> None:
    grads = [torch.randn(64, generator=torch.Generator().manual_seed(r)) for r in (1, 2, 3)]
    chosen, ats = choose(grads, [9, 9, 9]), [At(r, 3, 0) for r in range(3)]
    means = [
        run_lockstep([way(g, i, at) for g, i, at in zip(grads, chosen, ats, strict=True)], ats)
        for way in (average_selected, average_unequal)
    ]
    assert torch.equal(means[0][0].mean, means[1][0].mean)


def test_one_round_where_lengths_are_known() -> None:
    rounds = average_selected(torch.ones(8), torch.arange(3), At(0, 2, 0))
    request = next(rounds)
    assert isinstance(request, AllGather)
    assert request.payload.nbytes == 24
    with pytest.raises(StopIteration):
        rounds.send(request.payload.expand(2, -1).contiguous())

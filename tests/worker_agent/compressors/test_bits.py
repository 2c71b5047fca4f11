from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors._bits import (
    PARTS,
    Layout,
    decoded,
    get_codes,
    mean_of,
    parts,
    put_codes_,
)
from gradpilot.worker_agent.compressors.base import At, Compressor, Estimate
from gradpilot.worker_agent.compressors.efsignsgd import EfSignSgd
from gradpilot.worker_agent.compressors.natural import Natural
from gradpilot.worker_agent.compressors.onebit import OneBit
from gradpilot.worker_agent.compressors.qsgd import Qsgd
from gradpilot.worker_agent.compressors.signsgd import SignSgd
from gradpilot.worker_agent.compressors.terngrad import TernGrad
from gradpilot.worker_agent.testing import gradients

WIDTHS = (1, 2, 4, 8)


def packed_codes(layout: Layout, codes: Tensor) -> Tensor:
    message = layout.new(codes.device)
    for part in layout.parts:
        put_codes_(layout.codes_of(message), part, codes[part.elements])
    return message


def plain(codes: Tensor, scalars: Tensor, out: Tensor, start: int) -> None:
    out.copy_(codes).mul_(scalars[0])


def whole(layout: Layout, message: Tensor) -> Tensor:
    return torch.cat([values.clone() for _, values in decoded(layout, message, plain)])


@given(
    st.integers(1, 300) | st.integers(1 << 15, 1 << 16),
    st.sampled_from(WIDTHS),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=100)
def test_codes_come_back(n: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << width, (n,), generator=generator, dtype=torch.uint8)
    layout = Layout(n, width, scalars=1)
    message = packed_codes(layout, codes)
    back = torch.cat([get_codes(layout.codes_of(message), part) for part in layout.parts])
    assert torch.equal(back, codes)
    assert layout.codes_of(message).numel() == -(-n * width // 8)


@given(st.integers(1, 300) | st.integers(1 << 15, 1 << 17), st.sampled_from(WIDTHS))
@settings(deadline=None, max_examples=60)
def test_parts_cover_the_vector_in_order(n: int, width: int) -> None:
    cut = parts(n, width)
    assert 1 <= len(cut) <= PARTS
    ends = [0, *(part.elements.stop for part in cut)]
    assert [part.elements.start for part in cut] == ends[:-1]
    assert ends[-1] == n
    for part in cut:
        assert part.length == part.bytes.stop - part.bytes.start > 0
    if n >= 1 << 15:
        assert len(cut) == PARTS
        assert cut[0].length <= n // PARTS + width


def test_flags_are_codes() -> None:
    layout = Layout(9, 1, scalars=0)
    flags = torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1]).bool()
    message = packed_codes(layout, flags)
    assert message.numel() == 4  # two bytes, padded
    back = torch.cat([get_codes(message, part) for part in layout.parts])
    assert back.bool().tolist() == flags.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", WIDTHS)
def test_messages_of_all_ranks_are_read_in_place(dtype: torch.dtype, width: int) -> None:
    # Odd lengths: scalars of every gathered row must stay aligned.
    for n in (1, 3, 13):
        layout = Layout(n, width, scalars=3, dtype=dtype)
        rows = []
        for rank in range(3):
            message = packed_codes(layout, torch.full((n,), rank % 2, dtype=torch.uint8))
            layout.scalars_of(message).fill_(0.1 + rank)
            rows.append(message)
        gathered = torch.stack(rows)
        scalars = layout.scalars_of(gathered)
        assert scalars.data_ptr() == gathered.data_ptr()
        expected = torch.tensor([[0.1], [1.1], [2.1]], dtype=torch.float64).to(dtype) + 0
        assert torch.allclose(scalars, expected.expand(3, 3))
        for rank, row in enumerate(gathered):
            assert whole(layout, row).tolist() == pytest.approx([(rank % 2) * (0.1 + rank)] * n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mean_is_that_of_the_decoded(dtype: torch.dtype) -> None:
    layout = Layout(21, 4, scalars=1)
    rows = []
    for rank in range(3):
        codes = torch.arange(21, dtype=torch.uint8) % (5 * rank + 3)
        rows.append(packed_codes(layout, codes))
        layout.scalars_of(rows[-1]).fill_(rank - 0.5)
    place = torch.full((21,), torch.nan, dtype=dtype)
    assert mean_of(layout, torch.stack(rows), plain, place, 3) is place
    # Added up in fp32 and rounded once.
    expected = torch.stack([whole(layout, row) for row in rows]).mean(0)
    assert torch.allclose(place, expected.to(dtype))


class LargeAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of new tensors that are not small."""

    def __init__(self, small: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.small = small
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given_in = {
            value.untyped_storage().data_ptr()
            for value in (*args, *kwargs.values())
            if isinstance(value, Tensor)
        }
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in given_in and storage.nbytes() > self.small:
                self.bytes += storage.nbytes()
        return result


@pytest.mark.parametrize(
    "compressor",
    [
        EfSignSgd(),
        OneBit(),
        SignSgd(),
        SignSgd(exchange="all_reduce"),
        Natural(),
        TernGrad(),
        Qsgd(),
        Qsgd(levels=7, norm="max"),
        Qsgd(levels=7, norm="max", exchange="all_reduce"),
    ],
    ids=lambda c: f"{c.name}-{c.exchange}-{len(c.settings)}",
)
def test_ranks_are_decoded_one_by_one(compressor: Compressor) -> None:
    # Beside payloads nothing is as large as the bucket but the mean, and what was sent of votes.
    n, world_size = 1 << 20, 8
    grad = gradients(n, 1)[0]
    rounds = compressor.rounds(grad, At(0, world_size, 0))
    bucket = grad.nbytes
    allocations = LargeAllocations(small=bucket // 7)
    reply = None
    while True:
        with allocations:
            try:
                request = next(rounds) if reply is None else rounds.send(reply)
            except StopIteration as stop:
                estimate: Estimate = stop.value
                break
        payload = request.payload
        one_by_one = isinstance(request, AllReduce)
        reply = payload if one_by_one else payload.expand(world_size, -1).contiguous()
    buckets = 2 if isinstance(estimate.sent, Tensor) else 1
    payloads = bucket // 4 * 2  # int8 codes, and flags or a copy of them
    assert buckets * bucket <= allocations.bytes <= buckets * bucket + payloads + 4096

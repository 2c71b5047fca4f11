from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import DENSE
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors._chunks import Chosen, chunk_energies, leading
from gradpilot.worker_agent.compressors.base import At, Compressor, option_of
from gradpilot.worker_agent.compressors.sent import dense_sent
from gradpilot.worker_agent.compressors.topk import TopK
from gradpilot.worker_agent.compressors.topkc import TopKC
from gradpilot.worker_agent.testing import (
    CompressorConformance,
    average,
    gradients,
    relative_error,
    same_bits,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step


def exact(ratio: float, chunk: int) -> TopKC:
    return TopKC(ratio=ratio, chunk=chunk, wire_dtype="fp32")


class TestTopKC(CompressorConformance):
    compressors = (exact(0.3, 8), exact(0.6, 64))
    dense = (exact(1.0, 64),)


class TestTopKCInSixteenBits(CompressorConformance):
    compressors = (TopKC(ratio=0.3, chunk=8),)
    dense = (TopKC(ratio=1.0), TopKC(ratio=1.0, wire_dtype="fp16"))
    tolerance = 2e-2

    def skip_gradients(self, world_size: int) -> list[Tensor]:
        """Chunks of clearly different scores: of two like ones, rounding may choose either."""
        grads = gradients(4097, world_size)
        count = -(-4097 // 8)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        scale = (1.04 ** order.float()).repeat_interleave(8)[:4097]
        flat = [torch.sign(grad) * (1.0 + 0.01 * rank) for rank, grad in enumerate(grads)]
        return [scale * one for one in flat]


def one_step(compressor: TopKC, grads: list[Tensor]) -> VirtualStep:
    return virtual_step(option_of(compressor, "native"), grads)


def chunks_by_definition(grads: list[Tensor], compressor: TopKC) -> list[int]:
    """Return the numbers of the chosen chunks, literally: pad, score, sort."""
    size, n = compressor.chunk, grads[0].numel()
    count = -(-n // size)
    scores = torch.zeros(count).double()
    for grad in grads:
        padded = torch.zeros(count * size).double()
        padded[:n] = grad
        scores += padded.view(count, size).square().sum(1)
    j = max(1, int(compressor.ratio * count))
    return sorted(scores.sort(descending=True, stable=True).indices[:j].tolist())


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(1, 400),
    size=st.integers(1, 70),
    ratio=st.floats(0.01, 1.0),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_sends_the_chunks_of_the_definition(
    n: int, size: int, ratio: float, world_size: int, seed: int
) -> None:
    compressor = exact(ratio, size)
    grads = gradients(n, world_size, seed=seed)
    step = one_step(compressor, grads)
    kept = torch.zeros(n)
    for number in chunks_by_definition(grads, compressor):
        kept[number * size : (number + 1) * size] = 1.0
    for grad, residual in zip(grads, step.residuals, strict=True):
        assert torch.equal(residual, grad * (1.0 - kept))
    assert relative_error(step.mean, average(grads) * kept) < 1e-6


@pytest.mark.parametrize("where", [0, 3, 10])
def test_a_short_last_chunk_is_one_like_others(where: int) -> None:
    # Chunks of 4, the last one of 2 elements, on its own and beside any other.
    grad = torch.full((42,), 0.5)
    grad[4 * where] = 9.0
    for ratio, expected in ((0.1, {where}), (0.2, {where, 0 if where else 1})):
        step = one_step(exact(ratio, 4), [grad])
        kept = torch.tensor([float(number // 4 in expected) for number in range(42)])
        assert torch.equal(dense_sent(step.estimates[0].sent, grad), grad * kept)
        assert torch.equal(step.residuals[0], grad * (1.0 - kept))
        assert torch.equal(step.mean, grad * kept)


def test_padding_comes_after_real_data() -> None:
    grad = torch.zeros(10)
    grad[1] = 1e-3
    assert torch.equal(one_step(exact(0.5, 4), [grad]).mean, grad)


def test_padding_carries_the_poison() -> None:
    # A ring that skips may ask a rank for nothing but its padding.
    chosen = Chosen(9, 8, torch.tensor([1]))
    assert chosen.gather(torch.full((9,), torch.nan)).isnan().all()
    assert chosen.gather(torch.arange(9.0)).tolist() == [8.0] + [0.0] * 7


def test_of_equal_scores_the_lower_number_is_taken() -> None:
    step = one_step(exact(0.5, 4), [torch.ones(32)] * 3)
    assert step.mean.nonzero().view(-1).tolist() == list(range(16))


def test_scores_are_those_of_all_ranks_together() -> None:
    # No rank would choose chunk 2 alone; together they do, whatever their order.
    grads = [torch.tensor([3.0, 0.0, 2.5, 0.0]), torch.tensor([0.0, 3.0, 2.5, 0.0])]
    for order in (grads, grads[::-1]):
        assert one_step(exact(0.25, 1), order).mean.tolist() == [0.0, 0.0, 2.5, 0.0]


def test_chunks_of_one_element_are_topk_by_summed_squares() -> None:
    grads = gradients(500, 4)
    mean = one_step(exact(0.1, 1), grads).mean
    scores = torch.stack(grads).double().square().sum(0)
    assert set(mean.nonzero().view(-1).tolist()) == set(scores.topk(50).indices.tolist())


def test_all_chunks_are_the_dense_mean_bit_for_bit() -> None:
    grads = gradients(1001, 3)
    dense = virtual_step(DENSE, grads).mean
    assert same_bits(one_step(exact(1.0, 64), grads).mean, dense)
    assert same_bits(one_step(exact(0.1, 2000), grads).mean, dense)


def test_no_index_is_sent() -> None:
    # b = 16 / C + 16 J C / n bits per element: 2 at 10.94 % in chunks of 64.
    n = 1 << 20
    for bits, chunk, ratio in ((2.0, 64, 0.109375), (8.0, 64, 0.484375), (0.5, 128, 0.0234375)):
        rounds = TopKC(ratio=ratio, chunk=chunk, wire_dtype="fp16").wire(n)
        assert [r.collective for r in rounds] == ["all_reduce"] * 2
        assert sum(8 * r.bytes for r in rounds) / n == pytest.approx(bits, rel=1e-9)
        doubled = exact(ratio, chunk).wire(n)
        assert [r.bytes for r in doubled] == [2 * r.bytes for r in rounds]


def test_scores_are_never_skipped() -> None:
    request = next(exact(0.1, 4).rounds(torch.randn(100), At(0, 2, 0)))
    assert isinstance(request, AllReduce)
    assert not request.skippable


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("scale", [3e-5, 1.0, 1e4])
def test_sixteen_bits_rank_chunks_at_every_scale(wire_dtype: str, scale: float) -> None:
    # Squares of 3e-5 are zero in fp16, those of 1e4 are infinite.
    compressor = TopKC(ratio=0.25, chunk=16, wire_dtype=wire_dtype)
    grads = [scale * torch.arange(1.0, 257.0) / 256.0] * 4
    mean = one_step(compressor, grads).mean
    assert mean.nonzero().view(-1).tolist() == list(range(192, 256))
    assert relative_error(mean[192:], grads[0][192:]) < 2e-2


def test_what_is_rounded_away_arrives_later() -> None:
    # 1 + 2^-12 is 1 in bf16.
    compressor = TopKC(ratio=0.5, chunk=2)
    residuals: list[torch.Tensor] | None = None
    grad, arrived, steps = torch.full((8,), 1.0 + 2.0**-12), torch.zeros(8), 256
    for number in range(steps):
        option = option_of(compressor, "native")
        step = virtual_step(option, [grad] * 2, residuals, step=number)
        residuals, arrived = step.residuals, arrived + step.mean
    assert residuals is not None
    assert torch.equal(arrived + residuals[0], steps * grad)


def test_energies_need_no_full_chunk() -> None:
    grad = torch.tensor([3.0, 4.0, 1.0, 2.0, 2.0])
    assert chunk_energies(grad, 2).tolist() == pytest.approx([25.0, 5.0, 4.0])
    assert chunk_energies(grad, 8).tolist() == pytest.approx([34.0])
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        energies = chunk_energies(grad.to(dtype), 2)
        assert energies.dtype == torch.float32
        assert energies.tolist() == pytest.approx([25.0, 5.0, 4.0])


def test_leading_scores_by_index() -> None:
    scores = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0])
    assert leading(scores, 3).tolist() == [1, 2, 3]


# --- errors at equal bits ----------------------------------------------------------------------

N = 1 << 20


def vnmse(compressor: Compressor, grad: Tensor) -> float:
    option = option_of(compressor, compressor.collectives[0])
    error = virtual_step(option, [grad]).mean.double() - grad.double()
    return float(error.square().sum() / grad.double().square().sum())


def topk_at(bits: float) -> TopK:
    """Return top-k that spends so many bits per element: 16 on a value, 32 on its index."""
    return TopK(ratio=bits / 48)


def topkc_at(bits: float, chunk: int) -> TopKC:
    return TopKC(ratio=(bits - 16 / chunk) / 16, chunk=chunk, wire_dtype="fp16")


@pytest.mark.parametrize(
    ("bits", "topk", "topkc"), [(2.0, 0.754, 0.856), (8.0, 0.409, 0.446)], ids=str
)
def test_loses_to_topk_without_locality(bits: float, topk: float, topkc: float) -> None:
    grad = torch.randn(N, generator=torch.Generator().manual_seed(0))
    assert vnmse(topk_at(bits), grad) == pytest.approx(topk, rel=0.01)
    assert vnmse(topkc_at(bits, 64), grad) == pytest.approx(topkc, rel=0.01)


def local_gradient(seed: int, *, permuted: bool) -> Tensor:
    """Return noise whose scale changes from 256 elements to the next, log-normal of sigma 1.5.

    The energy of such a sample lies in its few largest scales, so that errors vary from sample to
    sample by a factor of three: the order of methods is what can be tested, not a value.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(N // 256, generator=generator).mul(1.5).exp()
    grad = (torch.randn(N // 256, 256, generator=generator) * scale[:, None]).view(-1)
    return grad[torch.randperm(N, generator=generator)] if permuted else grad


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("bits", "chunk"), [(2.0, 64), (8.0, 64)], ids=str)
def test_beats_topk_at_equal_bits_where_large_elements_lie_together(
    bits: float, chunk: int, seed: int
) -> None:
    grad, permuted = local_gradient(seed, permuted=False), local_gradient(seed, permuted=True)
    topk = vnmse(topk_at(bits), grad)
    assert vnmse(topkc_at(bits, chunk), grad) < 0.8 * topk
    # Without locality chunks lose, and by far.
    assert vnmse(topkc_at(bits, chunk), permuted) > 2.0 * topk


@pytest.mark.parametrize("setting", [{"ratio": 0.0}, {"chunk": 0}, {"wire_dtype": "int8"}])
def test_refuses_settings_out_of_bounds(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"topkc: setting {name} must be"):
        TopKC(**setting)

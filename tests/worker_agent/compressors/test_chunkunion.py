from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import DENSE, WireRound
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors.base import NOTHING, At, option_of
from gradpilot.worker_agent.compressors.chunkunion import ChunkUnion, marks_after, marks_at_first
from gradpilot.worker_agent.testing import (
    SIZES,
    Case,
    CompressorConformance,
    average,
    gradients,
    relative_error,
    same_bits,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step


def exact(ratio: float, chunk: int) -> ChunkUnion:
    return ChunkUnion(ratio=ratio, chunk=chunk, wire_dtype="fp32")


def remembered(marks: float, target: int) -> Mapping[str, Tensor]:
    return {"share": torch.tensor(marks / target, dtype=torch.float64)}


class ByUnion(CompressorConformance):
    def test_wire_formula_is_what_is_handed_in(self, case: Case, world_size: int) -> None:
        """The union decides: one byte a chunk, then the values of the chunks in it."""
        compressor = case.compressor
        assert isinstance(compressor, ChunkUnion)
        for n in SIZES:
            grads = gradients(n, world_size)
            step = self.step(case, grads)
            stated = tuple(compressor.wire(n))
            if len(stated) == 1:
                assert step.wire == stated
                continue
            count = -(-n // compressor.chunk)
            target = max(1, int(compressor.ratio * count))
            k = max(1, round(marks_at_first(target, count, world_size)))
            united = len(set().union(*(top_chunks(g, compressor.chunk, k) for g in grads)))
            width = 4 if compressor.wire_dtype == "fp32" else 2
            values = WireRound("all_reduce", width * min(united * compressor.chunk, n))
            assert step.wire == (WireRound("all_reduce", count, skippable=False), values)
            expected = WireRound("all_reduce", width * target * compressor.chunk)
            assert stated == (step.wire[0], expected)


class TestChunkUnion(ByUnion):
    compressors = (exact(0.3, 8), exact(0.6, 64))
    dense = (exact(1.0, 64),)


class TestChunkUnionInSixteenBits(ByUnion):
    compressors = (ChunkUnion(ratio=0.3, chunk=8),)
    dense = (ChunkUnion(ratio=1.0), ChunkUnion(ratio=1.0, wire_dtype="fp16"))
    tolerance = 2e-2


def top_chunks(grad: Tensor, size: int, k: int) -> set[int]:
    """Return the numbers of the k largest chunks, literally: pad, score, sort."""
    count = -(-grad.numel() // size)
    padded = torch.zeros(count * size).double()
    padded[: grad.numel()] = grad
    energies = padded.view(count, size).square().sum(1)
    return set(energies.sort(descending=True, stable=True).indices[:k].tolist())


def one_step(
    compressor: ChunkUnion, grads: list[Tensor], memory: Mapping[str, Tensor] = NOTHING
) -> VirtualStep:
    return virtual_step(option_of(compressor, "native"), grads, memories=[memory] * len(grads))


def united_in(step: VirtualStep, size: int) -> int:
    return step.wire[-1].bytes // (4 * size)


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(2, 40),
    tail=st.integers(1, 8),
    k=st.integers(1, 10),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_sends_every_chunk_that_some_rank_marked(
    count: int, tail: int, k: int, world_size: int, seed: int
) -> None:
    size, target = 8, count - 1
    n, k = size * (count - 1) + tail, min(k, target)
    grads = gradients(n, world_size, seed=seed)
    step = one_step(exact(target / count + 1e-9, size), grads, remembered(k, target))
    kept = torch.zeros(n)
    for grad in grads:
        for number in top_chunks(grad, size, k):
            kept[number * size : (number + 1) * size] = 1.0
    for grad, residual in zip(grads, step.residuals, strict=True):
        assert torch.equal(residual, grad * (1.0 - kept))
    assert relative_error(step.mean, average(grads) * kept) < 1e-6


def test_more_ranks_than_a_byte_can_count() -> None:
    grads = [torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0])] * 256
    assert torch.equal(one_step(exact(0.34, 2), grads).mean, grads[0])


def test_marks_are_never_skipped() -> None:
    request = next(exact(0.1, 4).rounds(torch.randn(100), At(0, 2, 0)))
    assert isinstance(request, AllReduce)
    assert (request.skippable, request.reduction.name) == (False, "max")
    assert request.payload.dtype == torch.uint8


def test_a_union_of_all_chunks_is_the_dense_mean_bit_for_bit() -> None:
    grads = gradients(64, 4)
    for rank, grad in enumerate(grads):
        grad[16 * rank : 16 * rank + 16] += 1e3
    step = one_step(exact(0.8, 16), grads, remembered(1.0, 3))
    assert step.wire == (WireRound("all_reduce", 4, skippable=False), WireRound("all_reduce", 256))
    assert same_bits(step.mean, virtual_step(DENSE, grads).mean)
    assert same_bits(one_step(exact(1.0, 16), grads).mean, step.mean)


# --- how many chunks a rank marks --------------------------------------------------------------


def test_the_rule_of_adaptation() -> None:
    assert marks_after(40.0, 100, 100) == 40.0
    assert marks_after(40.0, 125, 100) == pytest.approx(30.0 + 8.0)
    assert marks_after(40.0, 80, 100) == pytest.approx(30.0 + 12.5)
    # Clamped at 0.6 and at 1 / 0.6.
    assert marks_after(40.0, 1, 100) == pytest.approx(30.0 + 10.0 / 0.6)
    assert marks_after(40.0, 10_000, 100) == pytest.approx(30.0 + 10.0 * 0.6)
    assert marks_after(99.0, 1, 100) == 100.0
    assert marks_after(1.0, 900, 100) == 1.0


@settings(deadline=None)
@given(marks=st.floats(1.0, 1000.0), united=st.integers(1, 10_000), target=st.integers(1000, 9_999))
def test_adaptation_goes_the_right_way(marks: float, united: int, target: int) -> None:
    following = marks_after(marks, united, target)
    assert 1.0 <= following <= target
    if united > target:
        assert following <= marks
    else:
        assert following >= marks


@pytest.mark.parametrize("world_size", [1, 2, 8, 1024])
def test_first_marks_meet_the_target_of_ranks_that_mark_at_random(world_size: int) -> None:
    count, target = 10_000, 1000
    share = marks_at_first(target, count, world_size) / count
    assert count * (1.0 - (1.0 - share) ** world_size) == pytest.approx(target)
    assert marks_at_first(1000, 1000, world_size) == 1000.0


@pytest.mark.parametrize("kind", ["independent", "half common", "identical", "disjoint"])
def test_the_union_settles_at_the_target(kind: str) -> None:
    size, count, world_size, target = 4, 800, 4, 80
    compressor, residuals = exact(target / count, size), None
    memories: list[Mapping[str, Tensor]] = [NOTHING] * world_size
    united = []
    for number in range(24):
        generator = torch.Generator().manual_seed(number)
        common = torch.randn(size * count, generator=generator) ** 3
        grads = [common.clone() for _ in range(world_size)]
        if kind != "identical":
            noise = [torch.randn(size * count, generator=generator) ** 3 for _ in grads]
            weight = 0.0 if kind == "independent" else 1.0
            grads = [weight * g + e for g, e in zip(grads, noise, strict=True)]
        if kind == "disjoint":
            for rank, grad in enumerate(grads):
                grad.view(world_size, -1)[rank] *= 1e3
        step = virtual_step(
            option_of(compressor, "native"), grads, residuals, step=number, memories=memories
        )
        residuals, memories = step.residuals, step.memories
        united.append(united_in(step, size))
        shares = [m["share"] for m in memories]
        assert all(torch.equal(s, shares[0]) for s in shares)
    settled = sum(united[12:]) / 12
    assert settled == pytest.approx(target, rel=0.1), united


def test_marks_follow_a_change_of_the_ratio() -> None:
    grads = gradients(4000, 1)
    memory = one_step(exact(0.1, 4), grads).memories[0]
    assert united_in(one_step(exact(0.1, 4), grads, memory), 4) == 100
    assert united_in(one_step(exact(0.2, 4), grads, memory), 4) == 200


@pytest.mark.parametrize("setting", [{"ratio": 0.0}, {"chunk": 0}, {"wire_dtype": "int8"}])
def test_refuses_settings_out_of_bounds(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"chunkunion: setting {name} must be"):
        ChunkUnion(**setting)

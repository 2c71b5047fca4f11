from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors.base import option_of
from gradpilot.worker_agent.compressors.powersgd import PowerSgd
from gradpilot.worker_agent.testing import (
    Case,
    CompressorConformance,
    average,
    dense_sent,
    gradients,
    relative_error,
    same_bits,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step
from tests.ranks import run_ranks
from tests.worker_agent import training

FORMS = ("full", "half")
METHODS = ("qr", "gram_schmidt")


class TestPowerSgd(CompressorConformance):
    compressors = (
        PowerSgd(rank=2),
        PowerSgd(rank=3, orthogonalisation="gram_schmidt", min_saving=1.0),
        PowerSgd(rank=2, step="half"),
    )
    # A square basis spans everything; nothing worth compressing is sent as it is.
    dense = (
        PowerSgd(rank=64, min_saving=0.0),
        PowerSgd(rank=64, min_saving=0.0, orthogonalisation="gram_schmidt"),
        PowerSgd(rank=1, min_saving=1e9),
    )
    # Products and projections round; what was sent is no subset of the bits.
    exact = False
    tolerance = 5e-6

    def test_wire_formula_is_what_is_handed_in(self, case: Case, world_size: int) -> None:
        """As in the suite; ``half`` states the mean of the two lengths that alternate."""
        compressor = case.compressor
        assert isinstance(compressor, PowerSgd)
        if compressor.step == "full":
            super().test_wire_formula_is_what_is_handed_in(case, world_size)
            return
        for n in (1, 3, 64, 4097):
            grads = gradients(n, world_size)
            first = self.step(case, grads)
            second = self.step(case, grads, memories=first.memories)
            (stated,) = compressor.wire(n, self.shapes(n))
            made = [step.wire for step in (first, second)]
            assert [len(wire) for wire in made] == [1, 1]
            assert sum(wire[0].bytes for wire in made) == 2 * stated.bytes
            assert {wire[0].collective for wire in made} == {stated.collective}


def size(shapes: Sequence[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def one_step(
    compressor: PowerSgd,
    grads: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    memories: Sequence[Mapping[str, Tensor]] | None = None,
    residuals: Sequence[Tensor] | None = None,
    step: int = 0,
) -> VirtualStep:
    return virtual_step(
        option_of(compressor, "native"),
        grads,
        residuals,
        step=step,
        shapes=tuple(torch.Size(shape) for shape in shapes),
        compressor=compressor,
        memories=memories,
    )


def low_rank(rank: int, rows: int, columns: int, seed: int, world_size: int = 3) -> list[Tensor]:
    """Return gradients whose mean has this rank; those of single ranks have no low rank."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(rows, rank, generator=generator, dtype=torch.float64) @ torch.randn(
        rank, columns, generator=generator, dtype=torch.float64
    )
    noise = torch.randn(world_size, rows, columns, generator=generator, dtype=torch.float64)
    noise -= noise.mean(0)
    return [(mean + own).view(-1) for own in noise]


def sents(step: VirtualStep, grads: Sequence[Tensor]) -> list[Tensor]:
    return [dense_sent(e.sent, g) for e, g in zip(step.estimates, grads, strict=True)]


@pytest.mark.parametrize("shape", [(20, 30), (30, 20)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_exact_once_converged_if_the_rank_suffices(
    form: str, method: str, shape: tuple[int, int]
) -> None:
    compressor = PowerSgd(rank=4, step=form, orthogonalisation=method, min_saving=1.0)
    grads = low_rank(3, *shape, seed=0)
    memories = None
    errors = []
    for number in range(4):
        step = one_step(compressor, grads, [shape], memories, step=number)
        memories = step.memories
        errors.append(relative_error(step.mean, average(grads)))
    # A full step looks at the gradient first; a half step uses what the step before saw.
    assert errors[0 if form == "full" else 1] < 1e-12
    assert errors[-1] < 1e-12
    if form == "half":
        assert errors[0] > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_warm_start_finds_the_leading_directions(form: str) -> None:
    # Singular values 0.8^i, of which four directions are sent: the best error is known.
    generator = torch.Generator().manual_seed(1)
    left = torch.linalg.qr(torch.randn(40, 30, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64)).Q
    values = 0.8 ** torch.arange(30, dtype=torch.float64)
    grad = (left * values @ right.T).reshape(-1)
    best = float(values[4:].square().sum().sqrt() / values.square().sum().sqrt())
    compressor = PowerSgd(rank=4, step=form)
    memories, errors = None, []
    for number in range(60):
        step = one_step(compressor, [grad], [(40, 30)], memories, step=number)
        memories = step.memories
        errors.append(relative_error(step.mean, grad))
    assert errors[-1] == pytest.approx(best, rel=1e-3)
    assert errors[0] > 1.1 * best
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(errors))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(12, 50), (50, 12), (20, 20), (16, 3, 5)])
def test_a_rank_sends_a_projection_of_its_own_gradient(form: str, shape: tuple[int, ...]) -> None:
    compressor = PowerSgd(rank=3, step=form)
    rows, columns = shape[0], size([shape]) // shape[0]
    grads = [g.double() for g in gradients(rows * columns, 4)]
    memories = None
    for number in range(4):
        before = memories
        step = one_step(compressor, grads, [shape], memories, step=number)
        memories = step.memories
        # The basis lies on the shorter side in a full step; half steps alternate, and orthogonalise
        # what the last one averaged.
        on_short = form == "full" or number % 2 == 1
        on_rows = on_short == (rows <= columns)
        mean = step.mean.view(rows, columns)
        assert torch.linalg.matrix_rank(mean) <= 3
        basis = torch.linalg.svd(mean if on_rows else mean.T).U[:, :3]
        if form == "half" and before is not None:
            side = "short.0" if on_short else "long.0"
            kept = torch.linalg.qr(before[0][side].T).Q
            assert relative_error(basis @ basis.T, kept @ kept.T) < 1e-9
        for grad, sent in zip(grads, sents(step, grads), strict=True):
            matrix = grad.view(rows, columns)
            expected = basis @ (basis.T @ matrix) if on_rows else matrix @ basis @ basis.T
            assert relative_error(sent.view(rows, columns), expected) < 1e-9
        assert relative_error(step.mean, average(sents(step, grads))) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_a_given_basis_makes_it_linear(form: str) -> None:
    # Half steps take the basis from memory: the mean is linear in all gradients. In a full step the
    # basis depends on the mean gradient only, so moving gradient between ranks changes nothing.
    compressor = PowerSgd(rank=3, step=form)
    grads = [g.double() for g in gradients(600, 4)]
    others = [g.double() for g in gradients(600, 4, seed=9)]
    memories = one_step(compressor, others, [(20, 30)]).memories

    def mean(vectors: Sequence[Tensor]) -> Tensor:
        return one_step(compressor, vectors, [(20, 30)], memories, step=1).mean

    rolled = [g + (-1) ** r * others[0] for r, g in enumerate(grads)]
    assert relative_error(mean(rolled), mean(grads)) < 1e-9
    assert relative_error(mean([3.0 * g for g in grads]), 3.0 * mean(grads)) < 1e-9
    if form == "half":
        total = mean([g + o for g, o in zip(grads, others, strict=True)])
        assert relative_error(total, mean(grads) + mean(others)) < 1e-9


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_vectors_are_averaged_and_leave_nothing(form: str, world_size: int) -> None:
    shapes = [(7,), (20, 30), (2, 2), (), (5,), (20, 30), (3, 1)]
    grads = gradients(size(shapes), world_size)
    step = one_step(PowerSgd(rank=2, step=form), grads, shapes)
    start = 0
    for shape in shapes:
        part = slice(start, start + math.prod(shape))
        start = part.stop
        if shape == (20, 30):
            assert relative_error(step.mean[part], average(grads)[part]) > 0.1
            continue
        assert relative_error(step.mean[part], average(grads)[part]) < 2e-7
        assert not any(residual[part].any() for residual in step.residuals)


@pytest.mark.parametrize("form", FORMS)
def test_matrices_of_one_shape_do_not_mix(form: str) -> None:
    shapes = [(20, 30), (9,), (30, 20), (20, 30), (20, 30)]
    compressor = PowerSgd(rank=2, step=form)
    grads = [g.double() for g in gradients(size(shapes), 3)]
    memories = [
        {
            f"long.{i}": torch.randn(
                2, 30, generator=torch.Generator().manual_seed(i), dtype=torch.float64
            )
            for i in (0, 2, 3, 4)
        }
    ] * 3
    together = one_step(compressor, grads, shapes, memories)
    start = 0
    for position, shape in enumerate(shapes):
        part = slice(start, start + math.prod(shape))
        start = part.stop
        if shape == (9,):
            continue
        alone = one_step(
            compressor,
            [g[part].contiguous() for g in grads],
            [shape],
            [{"long.0": m[f"long.{position}"]} for m in memories],
        )
        assert relative_error(together.mean[part], alone.mean) < 1e-12
        side = "long" if form == "full" else "short"
        kept, expected = together.memories[0][f"{side}.{position}"], alone.memories[0][f"{side}.0"]
        assert kept.shape == expected.shape
        assert relative_error(kept @ kept.T, expected @ expected.T) < 1e-9


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=6),
    st.integers(1, 12),
    st.sampled_from(FORMS),
    st.sampled_from(METHODS),
    st.floats(0.0, 3.0),
    st.integers(1, 4),
)
def test_nothing_is_lost_whatever_the_shapes(
    shapes: list[list[int]], rank: int, form: str, method: str, min_saving: float, world_size: int
) -> None:
    compressor = PowerSgd(rank=rank, step=form, orthogonalisation=method, min_saving=min_saving)
    n = size(shapes)
    residuals, memories = None, None
    given_sum, arrived = torch.zeros(n).double(), torch.zeros(n).double()
    for number in range(3):
        grads = gradients(n, world_size, seed=number)
        step = one_step(compressor, grads, shapes, memories, residuals, number)
        residuals, memories = step.residuals, step.memories
        given_sum += average(grads)
        arrived += step.mean.double()
        stated = compressor.wire(n, [torch.Size(s) for s in shapes])
        assert len(step.wire) == len(stated)
        assert all(same_bits(e.mean, step.mean) for e in step.estimates)
    assert residuals is not None
    assert relative_error(arrived + average(residuals), given_sum) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
def test_directions_come_back_after_zero_gradients(form: str, method: str) -> None:
    compressor = PowerSgd(rank=3, step=form, orthogonalisation=method)
    grads = low_rank(3, 20, 30, seed=4)
    zero = [torch.zeros(600, dtype=torch.float64)] * 3
    memories = None
    for number in range(3):
        step = one_step(compressor, zero, [(20, 30)], memories, step=number)
        assert not step.mean.any()
        memories = step.memories
    for number in range(3, 7):
        step = one_step(compressor, grads, [(20, 30)], memories, step=number)
        memories = step.memories
    assert relative_error(step.mean, average(grads)) < 1e-9


def test_rank_beyond_both_sides_is_limited() -> None:
    shapes = [(2, 50), (50, 2), (1, 4), (4, 1)]
    grads = gradients(size(shapes), 2)
    step = one_step(PowerSgd(rank=64, min_saving=0.0), grads, shapes)
    assert relative_error(step.mean, average(grads)) < 1e-6
    assert {k: tuple(v.shape) for k, v in step.memories[0].items()} == {
        "long.0": (2, 50),
        "long.1": (2, 50),
        "long.2": (1, 4),
        "long.3": (1, 4),
    }


def test_wire_of_known_shapes() -> None:
    shapes = [torch.Size(s) for s in ((64, 3, 7, 7), (64,), (1000, 512), (1000,))]
    n = size(shapes)
    first, second = PowerSgd(rank=4).wire(n, shapes)
    assert first == WireRound("all_reduce", 4 * 4 * (64 + 512), skippable=False)
    assert second == WireRound("all_reduce", 4 * (4 * (147 + 1000) + 1064))
    (half,) = PowerSgd(rank=4, step="half").wire(n, shapes)
    assert half.bytes == (first.bytes + second.bytes - 4 * 1064) // 2 + 4 * 1064
    # Without shapes, or without a matrix worth it, it is one dense all-reduce.
    assert PowerSgd().wire(n) == (WireRound("all_reduce", 4 * n),)
    assert PowerSgd(rank=40).wire(64, [torch.Size([8, 8])]) == (WireRound("all_reduce", 256),)


def test_saving_decides_what_is_compressed() -> None:
    square = [torch.Size([16, 16])]  # 256 elements against 32 r, or 16 r a half step
    for form, most in (("full", 4), ("half", 8)):
        compressed = [
            PowerSgd(rank=r, step=form).wire(256, square) != (WireRound("all_reduce", 1024),)
            for r in range(1, 12)
        ]
        assert compressed == [r <= most for r in range(1, 12)]


def _train(rank: int, form: str) -> list[tuple[int, bool, str, float]]:
    net = training.wrap()
    handle = training.control(net, option_of(PowerSgd(rank=4, step=form), "native"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.002)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        training.backward(net, rank, step % 2)
        gradient = training.gradients(net)
        assert handle.layout is not None
        seen.append(
            (
                len(handle.layout.buckets),
                bool(gradient.isfinite().all()),
                training.digest(gradient),
                float(gradient.norm()),
            )
        )
        optimizer.step()
    handle.close()
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("form", FORMS)
def test_several_buckets_over_gloo(form: str) -> None:
    first, *others = run_ranks(_train, 3, form)
    for number, (buckets, finite, _, norm) in enumerate(first):
        assert finite
        assert norm > 0.0
        if number >= 2:
            assert buckets >= 4
    # All ranks end with the same bits, step by step, and steps differ.
    assert all(other == first for other in others)
    assert len({digest for _, _, digest, _ in first}) == len(first)


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"rank must be a whole number in \[1, 64\], got 65"):
        PowerSgd(rank=65)
    with pytest.raises(ConfigError, match=r"shapes \[\(3, 4\)\] do not fill a bucket of 13"):
        PowerSgd().wire(13, [torch.Size([3, 4])])

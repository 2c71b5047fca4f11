from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting
from gradpilot.worker_agent.collectives.base import AllGather, Broadcast
from gradpilot.worker_agent.compressors.artopk import ArTopK
from gradpilot.worker_agent.compressors.base import NOTHING, At, create
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.testing import (
    CompressorConformance,
    average,
    gradients,
    relative_error,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step


class TestArTopK(CompressorConformance):
    compressors = (
        ArTopK(ratio=0.01),
        ArTopK(ratio=0.3),
        ArTopK(ratio=0.3, selection="var"),
        ArTopK(ratio=0.3, selection="hybrid"),
    )
    dense = (
        ArTopK(ratio=1.0),
        ArTopK(ratio=1.0, selection="var"),
        ArTopK(ratio=1.0, selection="hybrid"),
    )


def option(ratio: float, selection: str = "star") -> Option:
    return Option("artopk", ratio, "native", settings=(Setting("selection", selection),))


def places(step: VirtualStep) -> list[set[int]]:
    """Return the indices that every rank sent."""
    sent = [e.sent for e in step.estimates]
    assert all(isinstance(s, Sparse) for s in sent)
    return [set(s.indices.tolist()) for s in sent if isinstance(s, Sparse)]


def star_source(step: int, world_size: int) -> int:
    rounds = ArTopK(ratio=0.1).rounds(torch.randn(64), At(0, world_size, step))
    request = next(rounds)
    assert isinstance(request, Broadcast)
    return request.source


def var_source(grads: list[Tensor], k: int) -> int:
    rounds = ArTopK(ratio=k / grads[0].numel(), selection="var").rounds(
        grads[0], At(0, len(grads), 0)
    )
    assert isinstance(next(rounds), AllGather)
    energies = torch.stack([g.abs().topk(k).values.square().sum().view(1) for g in grads])
    request = rounds.send(energies)
    assert isinstance(request, Broadcast)
    return request.source


@pytest.mark.parametrize(("world_size", "steps"), [(1, 5), (3, 20), (4, 16), (8, 1001)])
def test_star_takes_the_ranks_in_turn(world_size: int, steps: int) -> None:
    sources = [star_source(step, world_size) for step in range(steps)]
    assert sources == [step % world_size for step in range(steps)]
    counts = Counter(sources)
    assert {counts[r] for r in range(world_size)} <= {steps // world_size, -(-steps // world_size)}


def test_var_follows_the_largest_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1.0, 1.0, 1.3, 1.0])
    counts: Counter[int] = Counter()
    for _ in range(200):
        grads = [s * torch.randn(100, generator=generator) for s in scales]
        source = var_source(grads, 10)
        energies = [float(g.abs().topk(10).values.square().sum()) for g in grads]
        assert source == max(range(4), key=energies.__getitem__)
        counts[source] += 1
    # Chi-square against uniform, 3 degrees of freedom: 11.34 at p = .01.
    assert sum((counts[r] - 50) ** 2 / 50 for r in range(4)) > 11.34


def test_var_takes_the_first_of_equal_norms() -> None:
    assert var_source([torch.ones(20)] * 3, 2) == 0
    assert var_source([torch.zeros(20), torch.ones(20), torch.ones(20)], 2) == 1


@pytest.mark.parametrize("selection", ["star", "var"])
def test_own_values_at_the_indices_of_the_source(selection: str) -> None:
    grads = gradients(500, 4)
    grads[2] *= 10  # the source in step 6 of star, and by norm in var
    step = virtual_step(option(0.1, selection), grads, step=6)
    top = set(grads[2].abs().topk(50).indices.tolist())
    assert places(step) == [top] * 4
    chosen = torch.tensor(sorted(top))
    for grad, estimate, residual in zip(grads, step.estimates, step.residuals, strict=True):
        assert isinstance(estimate.sent, Sparse)
        assert torch.equal(estimate.sent.values, grad[estimate.sent.indices])
        expected = grad.clone()
        expected[chosen] = 0.0
        assert torch.equal(residual, expected)
    assert relative_error(step.mean[chosen], average(grads)[chosen]) < 1e-6
    assert step.mean.count_nonzero() <= 50


@pytest.mark.parametrize("selection", ["star", "var", "hybrid"])
def test_one_rank_is_plain_topk(selection: str) -> None:
    grads = gradients(500, 1)
    step = virtual_step(option(0.1, selection), grads)
    plain = virtual_step(Option("topk", 0.1, "allgather"), grads)
    assert torch.equal(step.mean, plain.mean)
    assert torch.equal(step.residuals[0], plain.residuals[0])


@pytest.mark.parametrize("selection", ["star", "var", "hybrid"])
def test_identical_gradients_give_topk_of_the_mean(selection: str) -> None:
    grad = gradients(500, 1)[0]
    mean = virtual_step(option(0.1, selection), [grad] * 4).mean
    expected = torch.zeros(500)
    top = grad.abs().topk(50).indices
    expected[top] = grad[top]
    assert torch.equal(mean, expected)


def test_disjoint_supports_lose_all_but_one_rank_without_feedback() -> None:
    grads = [torch.zeros(400) for _ in range(4)]
    for rank, grad in enumerate(grads):
        grad[100 * rank : 100 * rank + 100] = torch.linspace(1.0, 2.0, 100)
    step = virtual_step(option(0.25), grads, step=1)
    assert step.mean.sum() == pytest.approx(float(average(grads).sum()) / 4, rel=1e-6)


def test_feedback_serves_every_rank_within_n_steps() -> None:
    # Each rank has one element of its own that nobody else would choose.
    world_size, arrived = 4, torch.zeros(40)
    residuals = [torch.zeros(40) for _ in range(world_size)]
    grads = [torch.zeros(40) for _ in range(world_size)]
    for rank, grad in enumerate(grads):
        grad[10 * rank] = 1.0
    zero = [torch.zeros(40) for _ in range(world_size)]
    for number in range(world_size):
        step = virtual_step(option(0.025), grads if number == 0 else zero, residuals, step=number)
        residuals, arrived = step.residuals, arrived + step.mean
    assert torch.equal(arrived, average(grads).float())
    assert not any(r.any() for r in residuals)


def test_skip_feedback_keeps_the_values_that_were_left_out() -> None:
    grads = gradients(4096, 4)
    ring = Option(
        "artopk", 0.5, "ring", 2, skip_feedback=True, settings=(Setting("selection", "star"),)
    )
    step = virtual_step(ring, grads)
    for grad, estimate, residual in zip(grads, step.estimates, step.residuals, strict=True):
        assert isinstance(estimate.sent, Sparse)
        assert torch.equal(
            residual
            + estimate.mean.new_zeros(4096).index_copy_(
                0, estimate.sent.indices, estimate.sent.values
            ),
            grad,
        )
        assert (estimate.sent.values == 0).sum() == 1024


def hybrid_steps(
    scales: list[float], steps: int, memory: Mapping[str, Tensor] = NOTHING, start: int = 0
) -> tuple[list[int], Mapping[str, Tensor]]:
    """Return the sources, by the places that were sent, and what all ranks remember at the end."""
    world_size, sources = len(scales), []
    for number in range(start, start + steps):
        grads = [
            s * g for s, g in zip(scales, gradients(200, world_size, seed=number), strict=True)
        ]
        step = virtual_step(
            option(0.1, "hybrid"), grads, step=number, memories=[memory] * world_size
        )
        tops = [set(g.abs().topk(20).indices.tolist()) for g in grads]
        sources.append(tops.index(places(step)[0]))
        memory = step.memories[0]
        for other in step.memories[1:]:
            assert all(torch.equal(memory[name], other[name]) for name in memory)
    return sources, memory


def test_hybrid_is_star_while_ranks_are_alike() -> None:
    sources, memory = hybrid_steps([1.0, 1.3, 1.0, 0.8], 20)
    assert sources == [step % 4 for step in range(20)]
    assert memory["ages"].tolist() == [3, 2, 1, 0]
    assert not memory["following"]
    grads = gradients(500, 4)
    star, hybrid = (virtual_step(option(0.1, s), grads, step=2) for s in ("star", "hybrid"))
    assert torch.equal(star.mean, hybrid.mean)
    assert all(map(torch.equal, star.residuals, hybrid.residuals))


def test_hybrid_follows_a_rank_that_stays_louder_and_leaves_it_again() -> None:
    _, memory = hybrid_steps([1.0, 1.0, 10.0, 1.0], 40)
    assert memory["following"]
    sources, memory = hybrid_steps([1.0, 1.0, 10.0, 1.0], 40, memory, 40)
    assert sources.count(2) > 30
    # Nobody is forgotten: the others had a turn each in at most 5 N steps.
    assert set(sources) == {0, 1, 2, 3}
    assert int(memory["ages"].max()) < 20
    sources, memory = hybrid_steps([1.0, 1.0, 1.0, 1.0], 40, memory, 80)
    assert not memory["following"]
    assert sources[-8:] == [0, 1, 2, 3] * 2


def test_hybrid_starts_anew_with_another_world_size() -> None:
    _, memory = hybrid_steps([1.0, 1.0, 10.0, 1.0], 40)
    sources, memory = hybrid_steps([1.0, 1.0, 1.0], 6, memory)
    assert sources == [0, 1, 2] * 2
    assert memory["ages"].numel() == 3


def test_hybrid_remembers_nothing_of_overflow() -> None:
    grads = gradients(100, 3)
    grads[1][7] = 1e30  # its square is beyond fp32
    memory = virtual_step(option(0.1, "hybrid"), grads).memories[0]
    assert memory["shares"].isfinite().all()
    assert memory["shares"].sum() == pytest.approx(1.0)


def test_the_published_selections_remember_nothing() -> None:
    for selection in ("star", "var"):
        assert not any(virtual_step(option(0.1, selection), gradients(100, 3)).memories)
    assert {c.selection for c in ArTopK.ladder()} == {"star", "var"}


def test_refuses_what_is_out_of_bounds() -> None:
    with pytest.raises(ConfigError, match="must be one of star, var, hybrid, got 'best'"):
        create(option(0.1, "best"))
    with pytest.raises(
        ConfigError, match=r"artopk: setting ratio must be a number in \(0, 1\], got 0.0"
    ):
        ArTopK(ratio=0.0)

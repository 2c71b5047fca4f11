from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import DENSE
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors.base import At, option_of
from gradpilot.worker_agent.compressors.countsketch import CountSketchTopK
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.testing import (
    CompressorConformance,
    average,
    gradients,
    relative_error,
    same_bits,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step


class TestCountSketch(CompressorConformance):
    compressors = (CountSketchTopK(ratio=0.05, width=2.0),)
    dense = (CountSketchTopK(ratio=1.0), CountSketchTopK(ratio=0.5))


def one_step(compressor: CountSketchTopK, grads: list[Tensor], step: int = 0) -> VirtualStep:
    return virtual_step(option_of(compressor, "native"), grads, step=step)


def places(step: VirtualStep) -> set[int]:
    """Return the indices that every rank sent."""
    found = [e.sent.indices for e in step.estimates if isinstance(e.sent, Sparse)]
    assert len(found) == len(step.estimates)
    assert all(torch.equal(f, found[0]) for f in found)
    return set(found[0].tolist())


def test_finds_what_is_large_in_the_mean_and_on_no_rank() -> None:
    # Every rank has larger elements of its own, which cancel in the mean.
    n, world_size = 20_000, 8
    generator = torch.Generator().manual_seed(0)
    hitters = torch.randperm(n, generator=generator)[:40]
    noise = 3.0 * torch.randn(world_size, n, generator=generator)
    noise -= noise.mean(0)
    noise += 0.01 * torch.randn(world_size, n, generator=generator)
    common = torch.zeros(n).index_fill_(0, hitters, 1.0)
    grads = list(noise + common)
    own = {int(i) for g in grads for i in g.abs().topk(40).indices}
    assert len(own & set(hitters.tolist())) <= 4
    compressor = CountSketchTopK(ratio=40 / n, rows=5, width=30.0)
    step = one_step(compressor, grads)
    assert len(places(step) & set(hitters.tolist())) >= 38
    assert relative_error(step.mean, average(grads)) < 0.6


def test_own_values_at_the_common_places() -> None:
    grads = gradients(5000, 4)
    step = one_step(CountSketchTopK(ratio=0.01), grads)
    kept = torch.zeros(5000).index_fill_(0, torch.tensor(sorted(places(step))), 1.0)
    assert kept.sum() == 50
    for grad, estimate, residual in zip(grads, step.estimates, step.residuals, strict=True):
        assert isinstance(estimate.sent, Sparse)
        assert torch.equal(estimate.sent.values, grad[estimate.sent.indices])
        assert torch.equal(residual, grad * (1.0 - kept))
    assert relative_error(step.mean, average(grads) * kept) < 1e-6


@pytest.mark.parametrize(("width", "least"), [(4.0, 0.25), (8.0, 0.45), (16.0, 0.7)])
def test_wider_sketches_find_more_of_the_energy(width: float, least: float) -> None:
    grads = gradients(1 << 18, 4)
    squares = average(grads).square()
    k = int(0.01 * squares.numel())
    step = one_step(CountSketchTopK(ratio=0.01, width=width), grads)
    found = float(step.mean.double().square().sum() / squares.topk(k).values.sum())
    assert least < found < least + 0.15


def test_another_step_draws_other_collisions() -> None:
    grads = gradients(1 << 14, 2)
    compressor = CountSketchTopK(ratio=0.01, width=2.0)
    found = [places(one_step(compressor, grads, step)) for step in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_what_collisions_hid_arrives_later() -> None:
    option = option_of(CountSketchTopK(ratio=0.01, width=2.0), "native")
    residuals, arrived, steps = None, torch.zeros(2000).double(), 500
    grad = torch.linspace(0.5, 1.5, 2000)
    for number in range(steps):
        step = virtual_step(option, [grad, grad], residuals, step=number)
        residuals, arrived = step.residuals, arrived + step.mean.double()
    assert (arrived > 0).double().mean() > 0.95
    assert relative_error(arrived, steps * grad) < 0.6


def test_never_more_than_the_dense_bytes() -> None:
    for n in (1, 10, 1000, 1 << 20):
        for ratio in (0.001, 0.01, 0.1, 1.0):
            for width in (0.5, 8.0, 1000.0):
                rounds = CountSketchTopK(ratio=ratio, width=width).wire(n)
                assert sum(r.bytes for r in rounds) <= 4 * n
    grads = gradients(1000, 3)
    whole = one_step(CountSketchTopK(ratio=0.2), grads)
    assert same_bits(whole.mean, virtual_step(DENSE, grads).mean)


def test_the_sketch_is_never_skipped() -> None:
    request = next(CountSketchTopK().rounds(torch.randn(1000), At(0, 2, 0)))
    assert isinstance(request, AllReduce)
    assert not request.skippable
    assert request.payload.numel() == 3 * 80


@pytest.mark.parametrize("setting", [{"ratio": 0.0}, {"rows": 2}, {"rows": 4}, {"width": 0.0}])
def test_refuses_settings_out_of_bounds(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"countsketch: setting {name} must be"):
        CountSketchTopK(**setting)

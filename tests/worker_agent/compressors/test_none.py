from __future__ import annotations

import pytest
import torch

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting
from gradpilot.worker_agent.compressors.base import At, create
from gradpilot.worker_agent.compressors.none import NoCompression
from gradpilot.worker_agent.testing import (
    WORLD_SIZES,
    CompressorConformance,
    gradients,
    same_bits,
)
from gradpilot.worker_agent.virtual import run_lockstep, virtual_step


class TestNoCompression(CompressorConformance):
    compressors = (NoCompression(),)
    dense = compressors


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_are_those_of_ddp(world_size: int, divide: bool, feedback: bool) -> None:
    grads = gradients(4097, world_size)
    total = torch.zeros(4097)
    for grad in grads:
        total += grad / world_size if divide else grad * (1.0 / world_size)
    ats = [At(r, world_size, 0, feedback=feedback, divide=divide) for r in range(world_size)]
    rounds = [NoCompression().rounds(g, at) for g, at in zip(grads, ats, strict=True)]
    assert all(same_bits(e.mean, total) for e in run_lockstep(rounds, ats))


def test_works_in_place_without_feedback() -> None:
    grads = gradients(64, 2)
    ats = [At(rank, 2, 0, feedback=False) for rank in range(2)]
    estimates = run_lockstep(
        [NoCompression().rounds(g, at) for g, at in zip(grads, ats, strict=True)], ats
    )
    for grad, estimate in zip(grads, estimates, strict=True):
        assert estimate.mean.data_ptr() == grad.data_ptr()
        assert estimate.sent is None


def test_leaves_no_residual() -> None:
    step = virtual_step(Option(), gradients(64, 3), gradients(64, 3, seed=1))
    assert not any(r.any() for r in step.residuals)


def test_skip_feedback_keeps_the_omitted_slices_exactly() -> None:
    grads = gradients(1200, 4)
    option = Option(collective="ring", skip=1, rotation="static", skip_feedback=True)
    step = virtual_step(option, grads)
    for rank, (grad, residual) in enumerate(zip(grads, step.residuals, strict=True)):
        omitted = slice(300 * ((rank - 1) % 4), 300 * ((rank - 1) % 4) + 300)
        expected = torch.zeros(1200)
        expected[omitted] = grad[omitted]
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_refuses_a_ratio_and_settings(name: str) -> None:
    with pytest.raises(ConfigError, match=r"has no ratio: it must be 1, got 0\.5"):
        create(Option(compressor=name, ratio=0.5))
    with pytest.raises(ConfigError, match="no setting 'level'; accepted: none"):
        create(Option(compressor=name, settings=(Setting("level", "9"),)))

"""Every registered compressor over real groups: what the virtual ranks do, and alike on all ranks.

The suite of each compressor runs on virtual ranks; here each meets a process group once, with
residuals and memories handed on as the hook does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option
from gradpilot.worker_agent.compressors.base import (
    COMPRESSORS,
    At,
    create,
    leave_residual_,
    option_of,
)
from gradpilot.worker_agent.testing import gradients, relative_error, same_bits
from gradpilot.worker_agent.virtual import virtual_step
from gradpilot.worker_agent.wire import Wire
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

RANKS, N, STEPS = 3, 4097, 3
SHAPES = (torch.Size([64, 63]), torch.Size([64]), torch.Size([]))
SIXTEEN_BITS = 2e-2
FULL = 1e-5
"""Relative differences allowed where the backend adds up, in an order of its own."""


def options() -> list[Option]:
    """Return the defaults of every compressor under each flat carrier that serves 3 ranks."""
    found = []
    for name in COMPRESSORS:
        compressor = COMPRESSORS.get(name)()
        for carrier in compressor.collectives:
            try:
                compressor.check(RANKS, carrier)
            except ConfigError:
                continue
            if carrier in ("native", "ring", "allgather", "alltoall"):
                found.append(option_of(compressor, carrier))
    return found


def _steps(rank: int) -> list[list[Tensor]]:
    assert dist.group.WORLD is not None
    wire = Wire(dist.group.WORLD)
    results = []
    for option in options():
        compressor = create(option)
        residual = torch.zeros(N)
        memory: dict[str, Tensor] = {}
        seen = []
        for step in range(STEPS):
            corrected = gradients(N, RANKS, seed=step)[rank] + residual
            at = At(rank, RANKS, step, "b", 5, SHAPES, memory=memory)
            estimate, _ = wire.run(compressor.rounds(corrected, at), option, at)
            residual, memory = leave_residual_(corrected, estimate), dict(estimate.memory)
            seen.append(estimate.mean.clone())
        results.append([*seen, residual])
    return results


def _virtual(option: Option) -> tuple[list[Tensor], list[Tensor]]:
    """Return the mean of every step, and the last residuals by rank."""
    state: dict[str, Any] = {"residuals": None, "memories": None}
    means = []
    for step in range(STEPS):
        done = virtual_step(
            option,
            gradients(N, RANKS, seed=step),
            step=step,
            bucket="b",
            seed=5,
            shapes=SHAPES,
            **state,
        )
        state = {"residuals": done.residuals, "memories": done.memories}
        means.append(done.mean)
    return means, state["residuals"]


def test_each_does_over_gloo_what_it_does_on_virtual_ranks() -> None:
    real = run_ranks(_steps, RANKS)
    for number, option in enumerate(options()):
        by_rank = [results[number] for results in real]
        means, residuals = _virtual(option)
        for step in range(STEPS):
            first = by_rank[0][step]
            assert all(same_bits(r[step], first) for r in by_rank), f"{option.label}: ranks differ"
            assert bool(first.isfinite().all()), option.label
            if option.collective == "native":
                error = relative_error(first, means[step])
                allowed = SIXTEEN_BITS if "16" in repr(create(option)) else FULL
                assert error <= allowed, f"{option.label}, step {step}: {error}"
            else:
                assert same_bits(first, means[step]), f"{option.label}, step {step}"
        if option.collective != "native":
            for rank in range(RANKS):
                assert same_bits(by_rank[rank][-1], residuals[rank]), option.label

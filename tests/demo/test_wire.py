from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradpilot.demo.schedule import Phase, Schedule
from gradpilot.demo.wire import EmulatedWire
from gradpilot.policies.cost import coefficients
from gradpilot.protos.messages import DENSE, Option
from gradpilot.worker_agent.compressors.base import At, create
from tests.ranks import run_ranks

N = 2
NUMEL = 40_000
SCHEDULE = Schedule((Phase("near", 0, 0.0, 1e12), Phase("far", 5, 20e-3, 64e6)), 10)
OPTIONS = (
    DENSE,
    Option("topk", 0.1, "allgather"),
    Option("artopk", 0.1, "native"),
    Option("none", 1.0, "ring"),
    Option("none", 1.0, "ring", skip=1),
)


def _drive(rank: int) -> list[tuple[float, float, float]]:
    """Time of every collective under the near link, under the far one, and by the model."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    wire = EmulatedWire(group, SCHEDULE)
    seen = []
    for option in OPTIONS:
        stamps: list[Any] = []
        for step in (0, 1, 6):  # the first warms up
            at = At(rank=rank, world_size=N, step=step, bucket="b")
            grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
            _, timing = wire.run(create(option).rounds(grad, at), option, at)
            stamps.append(timing.stamps)
        for near, far in zip(stamps[1], stamps[2], strict=True):
            assert (near.collective, near.bytes) == (far.collective, far.bytes)
            model = wire.link_seconds(far.collective, far.bytes, far.skip, 6)
            seen.append((near.seconds, far.seconds, model))
    return seen


@pytest.mark.processes
def test_a_collective_lasts_as_long_as_the_model_says() -> None:
    for seen in run_ranks(_drive, N):
        assert len(seen) == 6  # AR-Topk asks for two
        for near, far, model in seen:
            assert model > 0.04
            assert near < model  # the near link costs loopback only
            assert model <= far < model + 0.04  # loopback and the sleeper's wake-up on top


def test_the_time_is_that_of_the_table_the_controller_fits_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    wire = functools.partial(EmulatedWire, schedule=SCHEDULE)(None)  # type: ignore[arg-type]
    for kind, skip in (("all_reduce", 0), ("all_gather", 0), ("broadcast", 0), ("ring", 2)):
        a, b = coefficients(kind, 4, skip, "gloo")
        wire._settle(kind, 1000, skip, At(rank=0, world_size=4, step=7))
        assert slept.pop() == pytest.approx(a * 20e-3 + b * 1000 * 8 / 64e6)


def test_it_says_that_it_is_an_emulation() -> None:
    assert EmulatedWire.emulated

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradpilot.policies import cost
from gradpilot.protos.messages import COLLECTIVES, Option
from gradpilot.worker_agent.collectives.base import Broadcast, Schedule
from gradpilot.worker_agent.collectives.scatter import NAME, scatter_broadcast
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.virtual import run_schedules
from gradpilot.worker_agent.wire import Stamp, Wire
from tests.ranks import run_ranks

SIZES = (1, 5, 24)
"""Some leave slices short or empty."""

world_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 16])


def made(world_size: int, source: int) -> list[Schedule]:
    return [scatter_broadcast(rank, world_size, source) for rank in range(world_size)]


def cases(world_size: int) -> Iterator[tuple[int, list[Schedule]]]:
    for source in range(world_size):
        yield source, made(world_size, source)


@world_sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bfloat16])
def test_all_end_with_the_payload_of_the_source(world_size: int, dtype: torch.dtype) -> None:
    for source, schedules in cases(world_size):
        for n in SIZES:
            payloads = [(torch.arange(n) + 100 * rank).to(dtype) for rank in range(world_size)]
            expected = payloads[source].clone()
            run_schedules(payloads, schedules)
            for payload in payloads:
                assert torch.equal(payload, expected)


@world_sizes
def test_who_brings_rubbish_is_not_heard(world_size: int) -> None:
    for source, schedules in cases(world_size):
        payloads = [torch.full((7,), torch.nan) for _ in range(world_size)]
        payloads[source] = torch.ones(7)
        run_schedules(payloads, schedules)
        assert all(torch.equal(payload, torch.ones(7)) for payload in payloads)
        for rank, schedule in enumerate(schedules):
            assert schedule.contributions == 1
            assert len(schedule.omitted) == (0 if rank == source else world_size)


@world_sizes
def test_no_rank_sends_the_payload_twice_and_none_is_sent_what_it_has(world_size: int) -> None:
    for source, schedules in cases(world_size):
        sent = [sum(len(step.send) for step in s.steps) for s in schedules]
        received = [sum(len(step.receive) for step in s.steps) for s in schedules]
        assert sent[source] == 2 * (world_size - 1)
        assert received[source] == 0
        for rank in set(range(world_size)) - {source}:
            last = (rank - source) % world_size == world_size - 1
            assert sent[rank] == (0 if last else world_size - 1)
            slices = [number for step in schedules[rank].steps for number in step.receive]
            assert sorted(slices) == list(range(world_size))  # each once


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 16, 64])
def test_the_cost_model_knows_what_the_source_sends(world_size: int) -> None:
    assert NAME in COLLECTIVES
    busiest = sum(len(step.send) for step in scatter_broadcast(0, world_size, 0).steps)
    for backend, once in (("model", 0), ("nccl", 0), ("gloo", 1)):
        alphas, payloads = cost.coefficients(NAME, world_size, 0, backend)
        # A slice arrives straight from the source, or around the ring that it starts.
        assert alphas == world_size - 1 + once
        assert payloads == pytest.approx(busiest / world_size)


def test_whether_ours_or_the_backends_is_cheaper_depends_on_backend_and_link() -> None:
    def cheaper(backend: str, alpha: float, size: int) -> str:
        def seconds(collective: str) -> float:
            a, b = cost.coefficients(cost.carried_by("broadcast", collective), 8, 0, backend)
            return a * alpha + b * size * 1e-7

        return min(("native", "ring"), key=seconds)

    # Gloo's tree sends six payloads one after the other.
    assert cheaper("gloo", 1e-3, 1_000_000) == "ring"
    assert cheaper("gloo", 10e-3, 1_000) == "native"
    assert cheaper("nccl", 1e-3, 1_000_000) == "native"
    assert cost.carried_by("broadcast", "allgather") == "broadcast"
    assert cost.carried_by("all_reduce", "tree") == "tree"
    assert cost.carried_by("all_gather", "ring") == "all_gather"


def _ask(payload: Tensor, source: int) -> Rounds:
    reply = yield Broadcast(payload, source)
    return Estimate(reply, None)


def _on_rank(rank: int) -> list[tuple[Any, Stamp]]:
    assert dist.group.WORLD is not None
    wire = Wire(dist.group.WORLD)
    found = []
    for source, n in ((0, 1), (2, 7), (1, 4097)):
        for collective in ("native", "ring"):
            own = torch.arange(n, dtype=torch.int32) + 1000 * rank
            option, at = Option(collective=collective), At(rank, wire.world_size, 0)
            estimate, timing = wire.run(_ask(own, source), option, at)
            found.append((estimate.mean.tolist(), timing.stamps[0]))
    return found


@pytest.mark.processes
def test_who_carries_all_reduces_carries_broadcasts_over_a_group() -> None:
    for of_rank in run_ranks(_on_rank, 3):
        for (source, n), native, ours in zip(
            ((0, 1), (2, 7), (1, 4097)), of_rank[::2], of_rank[1::2], strict=True
        ):
            assert native[0] == ours[0] == [1000 * source + i for i in range(n)]
            assert native[1].collective == "broadcast"
            assert ours[1].collective == NAME
            assert ours[1].bytes == 4 * n

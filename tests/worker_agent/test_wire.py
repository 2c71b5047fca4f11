"""The driver over real groups does what the lockstep driver does, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.collectives.skipping import omitted_parts, schedule_for
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds, Sparse, create
from gradpilot.worker_agent.virtual import run_lockstep
from gradpilot.worker_agent.wire import Wire
from tests.ranks import run_ranks
from tests.worker_agent.training import OPTIONS

pytestmark = pytest.mark.processes

SIZES = (1, 7, 4097)


def _wire() -> Wire:
    assert dist.group.WORLD is not None
    return Wire(dist.group.WORLD)


def _grad(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(10 * n + rank))


def _at(rank: int, world_size: int, step: int, *, feedback: bool = True) -> At:
    return At(rank=rank, world_size=world_size, step=step, bucket="b", feedback=feedback)


def _plain(estimate: Estimate) -> list[torch.Tensor]:
    sent = estimate.sent
    if isinstance(sent, Sparse):
        return [estimate.mean, sent.indices, sent.values]
    return [estimate.mean] if sent is None else [estimate.mean, sent]


def _real(rank: int) -> list[list[torch.Tensor]]:
    wire = _wire()
    results = []
    for option in OPTIONS:
        for n in SIZES:
            for step in range(4):
                at = _at(rank, wire.world_size, step)
                estimate, timing = wire.run(create(option).rounds(_grad(rank, n), at), option, at)
                assert len(timing.stamps) == len(create(option).wire(n))
                results.append(_plain(estimate))
    return results


def test_real_and_virtual_ranks_agree() -> None:
    world_size = 3
    real = run_ranks(_real, world_size)
    case = 0
    for option in OPTIONS:
        for n in SIZES:
            for step in range(4):
                ats = [_at(rank, world_size, step) for rank in range(world_size)]
                rounds = [create(option).rounds(_grad(at.rank, n), at) for at in ats]
                estimates = run_lockstep(rounds, ats, option)
                for rank in range(world_size):
                    for a, b in zip(real[rank][case], _plain(estimates[rank]), strict=True):
                        if option.collective == "native":  # the backend adds in its own order
                            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
                        else:
                            assert torch.equal(a, b), (option, n, step)
                case += 1


def _ask(payload: torch.Tensor) -> Rounds:
    request = AllReduce(payload)
    total = yield request
    return Estimate(total, None)


def _ring(rank: int) -> bool:
    wire = _wire()
    world_size = wire.world_size
    for n in (1024, 5000):
        for skip in range(world_size):
            for step in range(3):
                option = Option(collective="ring", skip=skip)
                at = _at(rank, world_size, step)
                payload = _grad(rank, n)
                masked = payload.clone()
                for part in omitted_parts(schedule_for(option, at, AllReduce(payload)), n):
                    masked[part] = 0.0
                dist.all_reduce(masked)
                estimate, timing = wire.run(_ask(payload), option, at)
                torch.testing.assert_close(estimate.mean, masked, rtol=1e-5, atol=1e-5)
                (stamp,) = timing.stamps
                assert (stamp.collective, stamp.skip, stamp.bytes) == ("ring", skip, 4 * n)
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_a_skipping_ring_is_an_all_reduce_of_masked_payloads(world_size: int) -> None:
    assert run_ranks(_ring, world_size) == [True] * world_size


def _probe(rank: int) -> tuple[float, list[float]]:
    wire = _wire()
    payload = torch.ones(1000)
    seconds = wire.probe(payload, step=3)
    return seconds, payload[:2].tolist()


def test_a_probe_times_one_all_reduce() -> None:
    for seconds, values in run_ranks(_probe, 2):
        assert 0.0 < seconds < 30.0
        assert values == [2.0, 2.0]

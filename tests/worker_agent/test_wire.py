"""The driver over real groups does what the lockstep driver does, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import (
    SCHEDULES,
    AllReduce,
    AllToAll,
    Collective,
    ReduceScatter,
)
from gradpilot.worker_agent.collectives.gather import gather_unequal
from gradpilot.worker_agent.collectives.reduction import MAX
from gradpilot.worker_agent.collectives.skipping import omitted_parts, schedule_for
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds, create
from gradpilot.worker_agent.compressors.sent import dense_sent
from gradpilot.worker_agent.peers import run_steps
from gradpilot.worker_agent.testing import same_bits
from gradpilot.worker_agent.testing_collectives import SATURATING, whole_numbers
from gradpilot.worker_agent.virtual import run_lockstep, run_schedules
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
    return [estimate.mean, dense_sent(estimate.sent, estimate.mean)]


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


def _ask(request: Collective) -> Rounds:
    reply = yield request
    return Estimate(reply.flatten(), None)


def _masked(rank: int, name: str) -> bool:
    wire = _wire()
    world_size = wire.world_size
    for n in (1024, 5000):
        for skip in range(SCHEDULES.get(name).most_skipped(world_size) + 1):
            for step in range(3):
                option = Option(collective=name, skip=skip)
                at = _at(rank, world_size, step)
                payload = _grad(rank, n)
                masked = payload.clone()
                for part in omitted_parts(schedule_for(option, at, AllReduce(payload)), n):
                    masked[part] = 0.0
                dist.all_reduce(masked)
                estimate, timing = wire.run(_ask(AllReduce(payload)), option, at)
                torch.testing.assert_close(estimate.mean, masked, rtol=1e-5, atol=1e-5)
                (stamp,) = timing.stamps
                assert (stamp.collective, stamp.skip, stamp.bytes) == (name, skip, 4 * n)
    return True


@pytest.mark.parametrize("name", SCHEDULES.names())
@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_a_skipping_schedule_is_an_all_reduce_of_masked_payloads(
    world_size: int, name: str
) -> None:
    assert run_ranks(_masked, world_size, name) == [True] * world_size


def _gather(payload: torch.Tensor) -> Rounds:
    parts = yield from gather_unequal(payload)
    return Estimate(torch.cat(parts), torch.tensor([part.numel() for part in parts]))


def _cases(rank: int, world_size: int) -> list[tuple[str, Option, Rounds]]:
    """Return a rank's rounds of every request, under every schedule where one carries it."""
    cases: list[tuple[str, Option, Rounds]] = []

    def add(option: Option, rounds: Rounds) -> None:
        cases.append((f"case {len(cases)}: {option.label}", option, rounds))

    def whole(n: int) -> torch.Tensor:  # the backend's order of adding is its own
        return whole_numbers(world_size, n, -99, 99)[rank]

    for name in SCHEDULES:
        most = SCHEDULES.get(name).most_skipped(world_size)
        for skip in range(most + 1):
            for n in (1, 5, 1023, 1024, 4097):
                add(Option(collective=name, skip=skip), _ask(AllReduce(_grad(rank, n))))
        for payload in (_grad(rank, 4097).bfloat16(), _grad(rank, 4097).double()):
            add(Option(collective=name, skip=most), _ask(AllReduce(payload)))
        for reduction in (MAX, SATURATING):
            payload = whole(4097).short()
            add(Option(collective=name, skip=most), _ask(AllReduce(payload, reduction=reduction)))
    for reduction in (MAX, SATURATING):
        add(Option(), _ask(AllReduce(whole(1025), reduction=reduction)))
    for n in (1, 700):
        add(Option(collective="alltoall"), _ask(AllToAll(_grad(rank, n * world_size))))
        add(Option(), _ask(ReduceScatter(whole(n * world_size))))
    for lengths in (
        [0] * world_size,
        [3 * r for r in range(world_size)],
        [0, 5, 0, 0],
        [7, 7, 7, 7],
    ):
        add(Option(collective="allgather"), _gather(_grad(rank, lengths[rank])))
    return cases


def _every_request(rank: int) -> list[tuple[list[torch.Tensor], tuple[str, ...]]]:
    wire = _wire()
    results = []
    for step, (_, option, rounds) in enumerate(_cases(rank, wire.world_size)):
        estimate, timing = wire.run(rounds, option, _at(rank, wire.world_size, step))
        results.append((_plain(estimate), tuple(stamp.collective for stamp in timing.stamps)))
    return results


@pytest.mark.parametrize("world_size", [3, 4])
def test_every_request_gives_the_bits_of_the_virtual_driver(world_size: int) -> None:
    real = run_ranks(_every_request, world_size)
    virtual = [_cases(rank, world_size) for rank in range(world_size)]
    for step, ranks in enumerate(zip(*virtual, strict=True)):
        label, option, _ = ranks[0]
        ats = [_at(rank, world_size, step) for rank in range(world_size)]
        estimates = run_lockstep([rounds for _, _, rounds in ranks], ats, option)
        for rank, estimate in enumerate(estimates):
            tensors, carried_by = real[rank][step]
            for a, b in zip(tensors, _plain(estimate), strict=True):
                assert same_bits(a, b), label
            if option.collective in SCHEDULES:
                assert carried_by == (option.collective,)


def _carried_by(rank: int) -> list[str]:
    wire, at = _wire(), _at(rank, 2, 0)
    requests = (
        AllReduce(torch.ones(4)),
        AllReduce(torch.ones(4), reduction=MAX),
        AllReduce(torch.ones(4), reduction=SATURATING),
        AllToAll(torch.ones(4)),
        ReduceScatter(torch.ones(4)),
    )
    return [wire.run(_ask(r), Option(), at)[1].stamps[0].collective for r in requests]


def test_the_ring_stands_in_where_the_backend_lacks_a_reduction() -> None:
    expected = ["all_reduce", "all_reduce", "ring", "all_to_all", "reduce_scatter"]
    assert run_ranks(_carried_by, 2) == [expected] * 2


def _step_by_step(rank: int) -> list[torch.Tensor]:
    assert dist.group.WORLD is not None
    world_size, results = dist.get_world_size(), []
    for name in SCHEDULES:
        algorithm = SCHEDULES.get(name)
        for skip in range(algorithm.most_skipped(world_size) + 1):
            payload = _grad(rank, 4097)
            schedule = algorithm.build(rank, world_size, skip=skip, shift=1)
            run_steps(dist.group.WORLD, payload, schedule, SATURATING, preposts=False)
            results.append(payload)
    return results


def test_steps_that_are_paired_as_on_nccl_give_the_same_bits() -> None:
    world_size, case = 3, 0
    real = run_ranks(_step_by_step, world_size)
    for name in SCHEDULES:
        algorithm = SCHEDULES.get(name)
        for skip in range(algorithm.most_skipped(world_size) + 1):
            payloads = [_grad(rank, 4097) for rank in range(world_size)]
            made = [algorithm.build(r, world_size, skip=skip, shift=1) for r in range(world_size)]
            run_schedules(payloads, made, SATURATING)
            assert all(same_bits(real[r][case], payloads[r]) for r in range(world_size)), name
            case += 1


def _probe(rank: int) -> tuple[float, list[float]]:
    wire = _wire()
    payload = torch.ones(1000)
    seconds = wire.probe(payload, step=3)
    return seconds, payload[:2].tolist()


def test_a_probe_times_one_all_reduce() -> None:
    for seconds, values in run_ranks(_probe, 2):
        assert 0.0 < seconds < 30.0
        assert values == [2.0, 2.0]

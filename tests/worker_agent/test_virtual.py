from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradpilot.errors import ConfigError, ProtocolError, UnknownNameError
from gradpilot.protos.messages import Option, WireRound
from gradpilot.worker_agent.collectives.base import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
    Schedule,
    Step,
)
from gradpilot.worker_agent.collectives.gather import gather_unequal
from gradpilot.worker_agent.collectives.reduction import MAX, Reduction
from gradpilot.worker_agent.collectives.ring import ring
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.testing import average, gradients, relative_error, same_bits
from gradpilot.worker_agent.virtual import run_lockstep, run_schedules, virtual_step


def ask(*requests: Collective) -> Rounds:
    """Ask for these and return the last reply."""
    reply = torch.zeros(0)
    for request in requests:
        reply = yield request
    return Estimate(reply, None)


def ats(world_size: int) -> list[At]:
    return [At(rank, world_size, 0) for rank in range(world_size)]


def run(make: Callable[[int], list[Collective]], world_size: int) -> list[Tensor]:
    rounds = [ask(*make(rank)) for rank in range(world_size)]
    return [e.mean for e in run_lockstep(rounds, ats(world_size))]


def test_all_reduce_adds_in_rank_order_and_in_the_dtype_of_the_payload() -> None:
    values = [2048.0, 1.0, 1.0]  # fp16 loses each 1 in turn; the other order would keep both
    out = run(lambda r: [AllReduce(torch.tensor([values[r]]).half())], 3)
    assert [o.tolist() for o in out] == [[2048.0]] * 3
    out = run(lambda r: [AllReduce(torch.tensor([values[2 - r]]).half())], 3)
    assert [o.tolist() for o in out] == [[2050.0]] * 3


def test_all_gather_and_broadcast() -> None:
    out = run(lambda r: [AllGather(torch.tensor([r, 10 * r]))], 3)
    assert all(o.tolist() == [[0, 0], [1, 10], [2, 20]] for o in out)
    out = run(lambda r: [Broadcast(torch.tensor([r]), source=1)], 3)
    assert [o.tolist() for o in out] == [[1]] * 3


def test_all_to_all_and_reduce_scatter() -> None:
    out = run(lambda r: [AllToAll(torch.tensor([0, 1, 2, 3, 4, 5]) + 10 * r)], 3)
    assert [o.tolist() for o in out] == [
        [[2 * r, 2 * r + 1], [2 * r + 10, 2 * r + 11], [2 * r + 20, 2 * r + 21]] for r in range(3)
    ]
    out = run(lambda r: [ReduceScatter(torch.tensor([0, 1, 2, 3, 4, 5]) + 10 * r)], 3)
    assert [o.tolist() for o in out] == [[30, 33], [36, 39], [42, 45]]


@pytest.mark.parametrize("collective", ["native", "ring", "halving_doubling", "tree"])
def test_reductions_other_than_the_sum(collective: str) -> None:
    product = Reduction("product", Tensor.mul_, native=False)
    for reduction, expected in ((MAX, [3, 30, 0]), (product, [6, 6000, 0])):
        rounds = [
            ask(AllReduce(torch.tensor([r, 10 * r, 0]), reduction=reduction)) for r in (1, 2, 3)
        ]
        estimates = run_lockstep(rounds, ats(3), Option(collective=collective))
        assert [e.mean.tolist() for e in estimates] == [expected] * 3


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 2, 5), (1, 0, 0), (3, 3, 3)])
def test_gather_of_unequal_lengths(lengths: tuple[int, ...]) -> None:
    def rounds(rank: int) -> Rounds:
        parts = yield from gather_unequal(torch.full((lengths[rank],), float(rank + 1)))
        return Estimate(torch.cat(parts), None)

    log: list[WireRound] = []
    estimates = run_lockstep([rounds(r) for r in range(3)], ats(3), log=log)
    expected = [float(r + 1) for r in range(3) for _ in range(lengths[r])]
    assert all(e.mean.tolist() == expected for e in estimates)
    longest = [WireRound("all_gather", 4 * max(lengths))] if any(lengths) else []
    assert log == [WireRound("all_gather", 8), *longest]


def all_gather(rank: int) -> list[Collective]:
    return [AllGather(torch.tensor([rank + 1]))]


def broadcast(rank: int) -> list[Collective]:
    return [Broadcast(torch.tensor([rank + 1]), source=0)]


def all_reduce(rank: int) -> list[Collective]:
    return [AllReduce(torch.tensor([rank + 1]))]


def all_to_all(rank: int) -> list[Collective]:
    return [AllToAll(torch.full((3,), rank + 1))]


def reduce_scatter(rank: int) -> list[Collective]:
    return [ReduceScatter(torch.full((3,), rank + 1))]


@pytest.mark.parametrize("make", [all_gather, broadcast, all_reduce, all_to_all, reduce_scatter])
def test_replies_are_the_rank_s_own(make: Callable[[int], list[Collective]]) -> None:
    out = run(make, 3)
    out[0].zero_()
    out[1].add_(100)
    assert not out[0].any()
    assert (out[1] > 100).all()
    assert ((out[2] > 0) & (out[2] < 100)).all()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (AllGather(torch.zeros(4)), "rank 2 asks for all_gather of 4 torch.float32"),
        (AllReduce(torch.zeros(5)), "rank 2 asks for all_reduce of 5 torch.float32"),
        (AllReduce(torch.zeros(4).half()), "rank 2 asks for all_reduce of 4 torch.float16"),
        (AllReduce(torch.zeros(4), skippable=False), r"rank 2 asks for .* \(not skippable\)"),
        (AllReduce(torch.zeros(4), reduction=MAX), "rank 2 asks for .* by max"),
        (ReduceScatter(torch.zeros(4)), "rank 2 asks for reduce_scatter of 4 torch.float32"),
        (AllToAll(torch.zeros(4)), "rank 2 asks for all_to_all of 4 torch.float32"),
    ],
)
def test_names_the_odd_rank(odd: Collective, message: str) -> None:
    with pytest.raises(ProtocolError, match=f"round 0: most ranks ask for all_reduce.*{message}"):
        run(lambda r: [odd] if r == 2 else [AllReduce(torch.zeros(4))], 4)


def test_names_a_rank_that_ends_early_or_names_another_source() -> None:
    with pytest.raises(ProtocolError, match=r"round 1: .* rank 0 asks for the end"):
        run(lambda r: [AllReduce(torch.zeros(4)) for _ in range(1 if r == 0 else 2)], 3)
    with pytest.raises(ProtocolError, match=r"rank 1 asks for broadcast of 1 .* from rank 1"):
        run(lambda r: [Broadcast(torch.zeros(1), source=r % 2)], 3)


def test_logs_what_one_rank_handed_in() -> None:
    log: list[WireRound] = []
    rounds = [
        ask(AllGather(torch.zeros(3)), AllReduce(torch.zeros(5).half(), skippable=False))
        for _ in range(4)
    ]
    run_lockstep(rounds, ats(4), log=log)
    assert log == [WireRound("all_gather", 12), WireRound("all_reduce", 10, skippable=False)]


def test_a_schedule_that_does_not_match_is_refused() -> None:
    payloads = [torch.zeros(8) for _ in range(4)]
    made = [ring(rank, 4, shift=1 if rank == 2 else 0) for rank in range(4)]
    with pytest.raises(ProtocolError, match="rank 2 expects slice"):
        run_schedules(payloads, made)


def two_ranks(first: Step, second: Step) -> list[Schedule]:
    return [Schedule(2, (step,), (), 2) for step in (first, second)]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            two_ranks(Step(1, (0, 1), 1, (), True), Step(0, (), 0, (1, 0), True)),
            r"rank 1 expects slices \(1, 0\) from rank 0, which sends slices \(0, 1\) to rank 1",
        ),
        (
            two_ranks(Step(1, (0, 1), 1, (), True), Step(0, (), 0, (), True)),
            "2 slices are sent in a step, but 0 received",
        ),
        (
            two_ranks(Step(1, (0,), 1, (1,), True), Step(0, (1,), 0, (0,), False)),
            "some ranks reduce in a step in which others gather",
        ),
    ],
)
def test_steps_that_do_not_match_are_refused(made: list[Schedule], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        run_schedules([torch.zeros(8), torch.zeros(8)], made)


def test_unknown_schedule_or_compressor() -> None:
    rounds = [ask(AllReduce(torch.zeros(8))) for _ in range(2)]
    with pytest.raises(UnknownNameError, match=r"unknown collective 'tee'; known: .*ring"):
        run_lockstep(rounds, ats(2), Option(collective="tee"))
    with pytest.raises(ConfigError, match="unknown compressor 'tpok'"):
        virtual_step(Option(compressor="tpok"), gradients(8, 2))


def test_residuals_are_added_and_kept() -> None:
    option = Option("topk", 0.25, "allgather")
    grads = [torch.tensor([1.0, 2.0, 3.0, 4.0])]
    first = virtual_step(option, grads)
    assert first.mean.tolist() == [0.0, 0.0, 0.0, 4.0]
    assert first.residuals[0].tolist() == [1.0, 2.0, 3.0, 0.0]
    second = virtual_step(option, grads, first.residuals)
    assert second.mean.tolist() == [0.0, 0.0, 6.0, 0.0]
    dense = virtual_step(Option(), grads, second.residuals)
    assert dense.mean.tolist() == [3.0, 6.0, 3.0, 8.0]
    assert not dense.residuals[0].any()
    assert grads[0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_nonfinite_step_leaves_residuals_alone() -> None:
    option = Option("topk", 0.25, "allgather")
    before = gradients(64, 3, seed=1)
    grads = gradients(64, 3)
    grads[1][7] = torch.inf
    step = virtual_step(option, grads, before)
    assert not step.mean.isfinite().all()
    assert all(map(same_bits, step.residuals, before))


@pytest.mark.parametrize(
    ("collective", "world_size"),
    [("native", 1024), ("ring", 256), ("halving_doubling", 256), ("tree", 200)],
)
def test_many_ranks(collective: str, world_size: int) -> None:
    grads = gradients(300, world_size)
    step = virtual_step(Option(collective=collective), grads)
    assert relative_error(step.mean, average(grads)) < 1e-5
    assert all(same_bits(e.mean, step.mean) for e in step.estimates)

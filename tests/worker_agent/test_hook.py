"""The gradient path over real process groups: the invariants of the data path."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradpilot.protos.messages import DENSE, Option
from gradpilot.worker_agent.compressors.base import create
from tests.ranks import run_ranks
from tests.worker_agent import training
from tests.worker_agent.training import OPTIONS

pytestmark = pytest.mark.processes

# --- parity with plain DDP -----------------------------------------------------------------------


def _train(rank: int, managed: bool, as_view: bool, set_to_none: bool) -> tuple[list[str], int]:
    net = training.wrap(gradient_as_bucket_view=as_view)
    handle = training.control(net) if managed else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    seen = []
    for step in range(20):
        optimizer.zero_grad(set_to_none=set_to_none)
        training.backward(net, rank, step)
        seen.append(training.digest(training.gradients(net)))
        optimizer.step()
    buckets = 0
    if handle is not None:
        assert handle.layout is not None
        assert handle.step == 20
        buckets = len(handle.layout.buckets)
        handle.close()
    return seen, buckets


def _pairs(rank: int) -> list[tuple[list[str], list[str], int]]:
    pairs = []
    for as_view in (False, True):
        for set_to_none in (False, True):
            plain, _ = _train(rank, False, as_view, set_to_none)
            managed, buckets = _train(rank, True, as_view, set_to_none)
            pairs.append((plain, managed, buckets))
    return pairs


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_dense_is_bit_equal_to_plain_ddp(world_size: int) -> None:
    for pairs in run_ranks(_pairs, world_size):
        for plain, managed, buckets in pairs:
            assert buckets >= 4
            assert managed == plain


# --- every option, and switches among them -------------------------------------------------------


def _one_option(rank: int, option: Option) -> tuple[bool, int, bool]:
    net = training.wrap()
    handle = training.control(net, option)
    layouts, equal = set(), True
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        training.backward(net, rank, step)
        grads = training.gradients(net)
        equal &= training.same_everywhere(training.digest(grads)) and bool(grads.isfinite().all())
        layouts.add(handle.layout.digest if handle.layout else "")
        optimizer.step()
    finite = handle.counters.nonfinite_steps == 0
    handle.close()
    return equal, len(layouts), finite


def _each_option(rank: int) -> dict[str, tuple[bool, int, bool]]:
    return {repr(option): _one_option(rank, option) for option in OPTIONS}


def test_every_option_keeps_ranks_identical_across_ddps_rebuild() -> None:
    for results in run_ranks(_each_option, 4):
        for option, (equal, layouts, finite) in results.items():
            assert equal, option
            assert finite, option
            assert layouts == 2, "DDP was expected to rebuild its buckets once"


def _switching(rank: int, seed: int, steps: int, switches: int) -> dict[str, Any]:
    net = training.wrap()
    handle = training.control(net)
    shared, own = random.Random(seed), random.Random(100 * seed + rank)
    at = sorted(shared.sample(range(3, steps - 1), switches))
    number, equal, used = 0, True, []
    total = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64)
    arrived = total.clone()
    for step in range(steps):
        if step in at:
            number += 1
            option = shared.choice([o for o in OPTIONS if o.skip == 0 or o.skip_feedback])
            # One rank hears of it; sometimes others do as well, in another order.
            if rank == number % 4 or own.random() < 0.3:
                handle._coordinator.offer(training.uniform_plan(handle, number, option))
        total += training.local_gradients(net, rank, step).double()
        for p in net.parameters():
            p.grad = None
        training.backward(net, rank, step)
        grads = training.gradients(net)
        arrived += grads.double()
        equal &= training.same_everywhere(training.digest(grads))
        used.append(handle.plan.id)
        if number == 0 and step == 2:
            # From here on every step is a decision step.
            handle._coordinator.offer(training.uniform_plan(handle, 0, DENSE))
    state = handle.state_dict()["residuals"]
    left = torch.cat(
        [
            state.get(name, torch.zeros(p.numel())).double()
            for name, p in net.module.named_parameters()
        ]
    )
    dist.all_reduce(total)
    dist.all_reduce(left)
    missing = (4 * arrived + left - total).norm() / total.norm()
    return {
        "equal": equal,
        "switches": handle.counters.switches,
        "used": used,
        "missing": float(missing),
        "frozen": handle.frozen,
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_switches_lose_nothing_and_keep_ranks_identical(seed: int) -> None:
    results = run_ranks(_switching, 4, seed, 60, 20)
    for result in results:
        assert result["frozen"] == ""
        assert result["equal"]
        assert result["switches"] >= 15  # two offers before one decision step make one switch
        assert result["used"] == results[0]["used"]
        assert result["missing"] < 2e-4  # 16-bit sums round; nothing else may be lost


# --- non-finite gradients ------------------------------------------------------------------------


def _poisoned(rank: int, option: Option, bad_rank: int, value: float) -> tuple[bool, bool, bool]:
    net = training.wrap()
    handle = training.control(net, option)
    for step in range(4):
        training.backward(net, rank, step)
    before = handle.state_dict()["residuals"]
    for p in net.parameters():
        p.grad = None
    weight = net.module[4].weight  # one parameter of one bucket in the middle
    loss = net(training.batch(rank, 4)).square().sum()
    planted = weight.register_hook(lambda g: g.clone().fill_(value) if rank == bad_rank else g)
    loss.backward()
    planted.remove()
    seen = not bool(training.gradients(net).isfinite().all())
    after = handle.state_dict()["residuals"]
    untouched = before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    for p in net.parameters():
        p.grad = None
    training.backward(net, rank, 5)
    healed = bool(training.gradients(net).isfinite().all())
    handle.close()
    return seen, untouched, healed


def _each_poisoned(rank: int, value: float) -> dict[str, tuple[bool, bool, bool]]:
    return {
        f"{option} on rank {bad_rank}": _poisoned(rank, option, bad_rank, value)
        for option in OPTIONS
        for bad_rank in (0, 2)
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_reaches_all_ranks_and_no_state(value: float) -> None:
    for results in run_ranks(_each_poisoned, 3, value):
        for case, (seen, untouched, healed) in results.items():
            assert seen, case
            assert untouched, case
            assert healed, case


# --- what the wire carries -----------------------------------------------------------------------


def _bytes(rank: int) -> dict[str, tuple[int, int]]:
    results = {}
    for option in OPTIONS:
        net = training.wrap()
        handle = training.control(net, option)
        for step in range(3):
            training.backward(net, rank, step)
        before = handle.counters.wire_bytes
        training.backward(net, rank, 3)
        assert handle.layout is not None
        compressor = create(option)
        stated = sum(r.bytes for b in handle.layout.buckets for r in compressor.wire(b.elements))
        results[repr(option)] = (handle.counters.wire_bytes - before, stated)
        handle.close()
    return results


def test_bytes_handed_to_collectives_are_those_of_the_formula() -> None:
    for results in run_ranks(_bytes, 3):
        for option, (measured, stated) in results.items():
            assert measured == stated, option


# --- failures ------------------------------------------------------------------------------------


def _failing(rank: int) -> str:
    from gradpilot.worker_agent.compressors.topk import TopK

    if rank == 1:
        original = TopK.rounds

        def rounds(self: TopK, grad: Any, at: Any) -> Any:
            if at.step == 3:
                raise MemoryError("planted")
            return (yield from original(self, grad, at))

        TopK.rounds = rounds  # type: ignore[method-assign]
    net = training.wrap()
    training.control(net, Option("topk", 0.1, "allgather"))
    for step in range(6):
        training.backward(net, rank, step)
    return "finished"


def test_a_failing_compressor_is_raised_and_never_passed_over() -> None:
    results = run_ranks(_failing, 2, expect_failure=True)
    assert "planted" in results[1]
    assert "finished" not in results


def _second_process_group_work(rank: int) -> bool:
    """User code that uses the default group during backward must not be disturbed."""
    net = training.wrap()
    training.control(net, Option("topk", 0.1, "allgather"))
    sums = []

    def note(_: torch.Tensor) -> None:
        mine = torch.ones(1)
        dist.all_reduce(mine)
        sums.append(float(mine))

    net.module[6].weight.register_hook(note)
    for step in range(8):
        training.backward(net, rank, step)
    return sums == [4.0] * 8


def test_user_collectives_during_backward_are_not_disturbed() -> None:
    assert run_ranks(_second_process_group_work, 4) == [True] * 4


def _kept_gradient(rank: int) -> bool:
    net: DistributedDataParallel = training.wrap(gradient_as_bucket_view=False)
    training.control(net, Option("topk", 0.1, "allgather"))
    training.backward(net, rank, 0)
    kept = [p.grad for p in net.parameters()]
    copies = [g.clone() for g in kept if g is not None]
    for p in net.parameters():
        p.grad = None
    for step in range(1, 5):
        training.backward(net, rank, step)
    return all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True) if a is not None)


def test_a_gradient_kept_from_an_earlier_step_does_not_change() -> None:
    assert run_ranks(_kept_gradient, 2) == [True] * 2

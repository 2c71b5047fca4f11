"""Dense steps of which nothing is noted: the same bits, the same counts, and in time for a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradpilot.protos.messages import DENSE, Option
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.handle import Handle
from tests.ranks import run_ranks
from tests.worker_agent import training

STEPS = 60
INTERVAL = 20


def _attach(net: DistributedDataParallel) -> Handle:
    # Statistics are denser for the first `statistics_steps`, and then no step is quiet.
    return attach(net, controller="off", statistics_steps=15)


def _count(handle: Handle) -> list[int]:
    """Note the numbers of the steps that are quiet from now on."""
    pipeline, quiet = handle._pipeline, handle._pipeline._quiet
    steps: list[int] = []
    on_bucket = quiet.on_bucket

    def noted(step: int, bucket: GradBucket) -> Future[torch.Tensor]:
        if not steps or steps[-1] != step:
            steps.append(step)
        assert step == pipeline.step
        return on_bucket(step, bucket)

    quiet.on_bucket = noted  # type: ignore[method-assign]
    return steps


def _beside_plain(
    rank: int, view: bool, set_to_none: bool
) -> tuple[list[int], bool, tuple[int, ...]]:
    """Train with and without an agent on the same data; compare all bits after every step."""
    plain = training.wrap(gradient_as_bucket_view=view)
    managed = training.wrap(gradient_as_bucket_view=view)
    handle = _attach(managed)
    quiet = _count(handle)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (plain, managed)]
    equal = True
    for step in range(STEPS):
        for net, optimizer in zip((plain, managed), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            training.backward(net, rank, step)
        equal &= training.digest(training.gradients(plain)) == training.digest(
            training.gradients(managed)
        )
        for optimizer in optimizers:
            optimizer.step()
    layout = handle.layout
    assert layout is not None
    counters = handle.counters
    return quiet, equal, (
        counters.steps, counters.wire_bytes, counters.dense_bytes, 4 * layout.elements * STEPS
    )  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize(("view", "set_to_none"), [(False, True), (True, False)])
def test_quiet_steps_give_the_bits_of_plain_ddp_and_count_their_bytes(
    view: bool, set_to_none: bool
) -> None:
    # With 3 ranks 1/N is not exact, so it matters whether DDP would have divided.
    for quiet, equal, (steps, wire, dense, expected) in run_ranks(
        _beside_plain, 3, view, set_to_none
    ):
        assert equal
        assert len(quiet) > STEPS // 4
        assert min(quiet) >= 15
        assert steps == STEPS
        assert wire == dense == expected


def _switched(rank: int) -> tuple[list[int], list[str], bool]:
    net = training.wrap()
    handle = _attach(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    quiet, labels, same = _count(handle), [], True
    lossy = Option("topk", 0.1, "allgather")
    offers = {1: DENSE, 45: lossy, 85: DENSE}
    for step in range(140):
        if option := offers.get(step - rank):  # the ranks do not hold it at once
            plan = training.uniform_plan(handle, step - rank, option, INTERVAL)
            handle._coordinator.offer(plan)
        optimizer.zero_grad()
        training.backward(net, rank, step)
        optimizer.step()
        labels.append(handle.plan.options()[0].label)
        if step % 13 == 0:
            same &= training.same_everywhere(
                training.digest(torch.cat([p.detach().flatten() for p in net.parameters()]))
            )
    return quiet, labels, same


@pytest.mark.processes
def test_a_plan_ends_quiet_steps_at_its_decision_step_and_residuals_end_them_for_longer() -> None:
    results = run_ranks(_switched, 2)
    quiet, labels, same = results[0]
    assert same
    assert all(other[1] == labels for other in results)
    lossy = Option("topk", 0.1, "allgather").label
    in_force = [step for step, label in enumerate(labels) if label == lossy]
    assert (in_force[0], in_force[-1]) == (60, 99)
    assert min(quiet) < 60
    assert max(quiet) > 100
    assert not set(quiet) & set(range(60, 101)), "step 100 sends the residual, it is not quiet"
    assert not [step for step in quiet if step % INTERVAL == 0], "a decision step was quiet"


def _with_sparse(rank: int) -> tuple[list[int], int]:
    table, layer = nn.Embedding(8, 64, sparse=True), nn.Linear(64, 64)
    net = DistributedDataParallel(nn.Sequential(table, layer), bucket_cap_mb=training.BUCKET_MB)
    handle = _attach(net)
    quiet = _count(handle)
    for _ in range(80):
        net.zero_grad()
        net(torch.tensor([rank, 3])).square().sum().backward()
    return quiet, handle.step


@pytest.mark.processes
def test_no_step_with_a_sparse_gradient_is_quiet() -> None:
    for quiet, steps in run_ranks(_with_sparse, 2):
        assert steps == 80
        assert quiet == []

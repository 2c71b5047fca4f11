"""Every mode of DDP: a dense plan changes no bit, a lossy one keeps all ranks alike."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradpilot.protos.messages import DENSE
from gradpilot.worker_agent.handle import Handle, _open
from tests.ranks import run_ranks
from tests.training import jobs
from tests.training.jobs import TOPK, Mode, Trained
from tests.worker_agent import training

pytestmark = pytest.mark.processes


def _freeze(net: DistributedDataParallel) -> None:
    net.module[4].requires_grad_(False)


def _unfreeze_later(net: DistributedDataParallel, step: int) -> None:
    net.module[4].requires_grad_(step >= 4)


def _frozen() -> nn.Module:
    net = jobs.stack(5)
    net[2].requires_grad_(False)
    return net


def _compiled(net: DistributedDataParallel, backend: str = "aot_eager") -> nn.Module:
    torch._dynamo.reset()
    # DDPOptimizer takes no bucket that is smaller than the first one.
    vars(dist)["_DEFAULT_FIRST_BUCKET_BYTES"] = int(jobs.BUCKET_MB * 2**20)
    compiled: Any = torch.compile(net, backend=backend)
    return cast(nn.Module, compiled)


def _needs_input(net: nn.Module, rank: int, step: int) -> None:
    net(jobs.batch(rank, step).requires_grad_()).square().sum().backward()


SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # torch 2.13 renamed it
    if name in inspect.signature(DistributedDataParallel).parameters
)

MODES = (
    Mode("gradient_as_bucket_view", options={"gradient_as_bucket_view": True}),
    Mode("static_graph", options={"static_graph": True}),
    Mode(
        "find_unused_parameters",
        jobs.Branches,
        jobs.through_branches,
        {"find_unused_parameters": True},
    ),
    Mode(
        "find_unused_parameters, gradients as views",
        jobs.Branches,
        jobs.through_branches,
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    ),
    Mode("checkpointing, reentrant", partial(jobs.Checkpointed, True), _needs_input),
    Mode(
        "checkpointing, reentrant, static_graph",
        partial(jobs.Checkpointed, True),
        _needs_input,
        {"static_graph": True},
    ),
    Mode("checkpointing, not reentrant", partial(jobs.Checkpointed, False)),
    Mode("frozen before wrapping", _frozen),
    Mode(
        "frozen after wrapping, unfrozen later",
        partial(jobs.stack, 5),
        options={"find_unused_parameters": True},
        after_wrap=_freeze,
        before_step=_unfreeze_later,
    ),
    Mode("tied weights", jobs.Tied),
    Mode("mixed dtypes", jobs.Mixed),
    Mode("complex parameters", jobs.Complex),
    Mode("sparse gradients", jobs.Sparse),
    Mode("BatchNorm", jobs.normed),
    Mode("BatchNorm, buffers not broadcast", jobs.normed, options={SYNC_BUFFERS: False}),
    Mode("torch.compile", call=_compiled),
)


each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


@pytest.fixture(scope="module")
def trained() -> dict[str, list[tuple[Trained, Trained, Trained]]]:
    """Train all jobs in one set of ranks; return for each the results of all ranks."""
    results = run_ranks(jobs.run_all, 2, MODES)
    return {mode.name: [result[mode.name] for result in results] for mode in MODES}


Results = dict[str, list[tuple[Trained, Trained, Trained]]]


@each_mode
def test_dense_is_bit_equal_to_plain_ddp(mode: Mode, trained: Results) -> None:
    for plain, dense, _ in trained[mode.name]:
        assert dense.digests == plain.digests
        assert dense.in_sync
        assert dense.steps == jobs.STEPS
        assert dense.buckets >= mode.buckets


@each_mode
def test_lossy_keeps_all_ranks_alike_through_a_switch(mode: Mode, trained: Results) -> None:
    for plain, dense, lossy in trained[mode.name]:
        assert plain.in_sync
        assert lossy.in_sync
        assert not lossy.diverged
        assert lossy.digests != dense.digests, "the plan was expected to lose something"
        assert lossy.switches == 1


# --- nothing is lost of parameters that nobody used ----------------------------------------------


WHOLE_FROM = 12
"""Dense from this step on, in which nobody uses branches 1 to 3; the next one uses all."""


def _conserved(rank: int, as_view: bool, set_to_none: bool) -> tuple[float, float, float]:
    """Return what is left in the first dense step and in the last, and what is missing then."""
    torch.manual_seed(3)
    branches = jobs.Branches()
    net = DistributedDataParallel(
        branches,
        bucket_cap_mb=jobs.BUCKET_MB,
        find_unused_parameters=True,
        gradient_as_bucket_view=as_view,
    )
    handle = training.control(net, TOPK)
    alone = copy.deepcopy(branches)
    total = torch.zeros(sum(p.numel() for p in branches.parameters()), dtype=torch.float64)
    arrived = total.clone()
    waiting = []
    for step in range(WHOLE_FROM + 2):
        if step == WHOLE_FROM:
            handle._coordinator.restore(training.uniform_plan(handle, 1, DENSE))
        net.zero_grad(set_to_none=set_to_none)
        alone.zero_grad()
        jobs.through_branches(net, rank, step)
        alone.rank, alone.step = rank, step
        jobs.one_backward(alone, rank, step)
        total += _gradients(alone)
        arrived += _gradients(branches)
        left = sum(float(r.norm()) for r in handle.state_dict()["residuals"].values())
        waiting.append(left)
    dist.all_reduce(total)
    missing = float((total - 2 * arrived).norm() / total.norm())
    return waiting[-2], waiting[-1], missing


def _gradients(module: nn.Module) -> torch.Tensor:
    zero = torch.zeros(())
    parts = [(zero.expand_as(p) if p.grad is None else p.grad) for p in module.parameters()]
    return torch.cat([p.flatten().double() for p in parts])


def _each_conserved(rank: int) -> dict[tuple[bool, bool], tuple[float, float, float]]:
    cases = [(as_view, none) for as_view in (False, True) for none in (False, True)]
    return {case: _conserved(rank, *case) for case in cases}


def test_a_residual_waits_while_nobody_uses_its_parameter() -> None:
    for results in run_ranks(_each_conserved, 2):
        for (as_view, none), (waiting, left, missing) in results.items():
            # Gradients that are views and were zeroed receive even what no rank used.
            assert (waiting == 0.0) == (as_view and not none)
            assert left == 0.0
            assert missing < 1e-6


# --- uneven inputs -------------------------------------------------------------------------------


def _joined(
    rank: int, option: Any, steps: tuple[int, int], **options: Any
) -> tuple[str, bool, int, int]:
    torch.manual_seed(3)
    net = DistributedDataParallel(jobs.normed(), bucket_cap_mb=jobs.BUCKET_MB, **options)
    handle = training.control(net, option) if option is not None else None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    with net.join():
        for step in range(steps[rank]):
            if handle is not None and option is TOPK and step == 4 and steps[rank] == max(steps):
                jobs.offer(handle, 1, jobs.ARTOPK)  # takes effect when the other rank has joined
            optimizer.zero_grad()
            jobs.one_backward(net, rank, step)
            optimizer.step()
    result = jobs.digest(net.module.state_dict().values())
    alike = training.same_everywhere(result) and jobs.finite(net)
    counted = (handle.step, handle.counters.switches) if handle is not None else (0, 0)
    if handle is not None:
        # The next epoch goes on together.
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)  # momenta differ after join
        for step in range(3):
            optimizer.zero_grad()
            jobs.one_backward(net, rank, step)
            optimizer.step()
        alike &= training.same_everywhere(jobs.digest(net.parameters()))
        assert handle.frozen == ""
        handle.close()
    return result, alike, *counted


def _each_joined(rank: int) -> list[list[Any]]:
    return [
        [_joined(rank, option, steps, **options) for option in (None, DENSE, TOPK)]
        for steps, options in (
            ((6, 12), {}),
            ((12, 6), {"gradient_as_bucket_view": True}),
            ((0, 12), {"find_unused_parameters": True}),
        )
    ]


def test_join_with_uneven_inputs() -> None:
    for results in run_ranks(_each_joined, 2):
        for plain, dense, lossy in results:
            assert dense[0] == plain[0]
            assert dense[1]
            assert lossy[1]
            assert dense[2] == lossy[2] == 12, "a rank that joined takes part in every step"
            assert lossy[3] == 1


# --- parameters unfrozen by wrapping anew --------------------------------------------------------


def _unfreeze_by_wrapping(rank: int, option: Any) -> tuple[str, bool]:
    torch.manual_seed(3)
    module = jobs.stack(5)
    module[4].requires_grad_(False)
    alike = True
    for trainable in (False, True):
        module[4].requires_grad_(trainable)
        net = DistributedDataParallel(module, bucket_cap_mb=jobs.BUCKET_MB)
        handle = training.control(net, option) if option is not None else None
        optimizer = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            jobs.one_backward(net, rank, step)
            optimizer.step()
            alike &= training.same_everywhere(jobs.digest(net.parameters()))
        if handle is not None:
            assert handle.layout is not None
            assert sum(b.parameters for b in handle.layout.buckets) == (10 if trainable else 8)
            handle.detach()
    return jobs.digest(module.parameters()), alike


def _each_unfreezing(rank: int) -> list[tuple[str, bool]]:
    return [_unfreeze_by_wrapping(rank, option) for option in (None, DENSE, TOPK)]


def test_unfreezing_by_wrapping_and_attaching_anew() -> None:
    for plain, dense, lossy in run_ranks(_each_unfreezing, 2):
        assert dense == plain
        assert lossy[1]
        assert lossy[0] != dense[0]


# --- torch.compile -------------------------------------------------------------------------------


def _compiled_first(rank: int) -> list[tuple[int, bool]]:
    """Attach what ``torch.compile`` returned, and let a model attach itself while it is traced."""
    from gradpilot.worker_agent.managing import manage_every_model

    results = []
    by_hand = jobs.Mode("").wrap()
    compiled = _compiled(by_hand, "eager")
    results.append(_counted(rank, by_hand, compiled, training.control(compiled, TOPK)))  # type: ignore[arg-type]

    manage_every_model(DistributedDataParallel)
    by_itself = jobs.Mode("").wrap()
    compiled = _compiled(by_itself, "eager")
    jobs.one_backward(compiled, rank, 0)
    results.append(_counted(rank, by_itself, compiled, next(iter(_open))))
    return results


def _counted(
    rank: int, net: DistributedDataParallel, compiled: nn.Module, handle: Handle
) -> tuple[int, bool]:
    for step in range(3):
        net.zero_grad()
        jobs.one_backward(compiled, rank, step)
    alike = training.same_everywhere(training.digest(training.gradients(net)))
    steps = handle.step
    handle.close()
    return steps, alike


def test_a_compiled_model_can_be_attached_and_attaches_itself() -> None:
    for by_hand, by_itself in run_ranks(_compiled_first, 2, GRADPILOT_CONTROLLER="off"):
        assert by_hand == (3, True)
        assert by_itself == (4, True)

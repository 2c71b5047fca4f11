"""``model.register_comm_hook(state, hook)``, and what torch's own hook tests ask of any hook."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradpilot
from gradpilot.errors import AttachError, ConfigError
from gradpilot.protos.messages import DENSE, Option
from gradpilot.worker_agent.hook_state import HookState, hook
from tests.ranks import run_ranks
from tests.training import jobs
from tests.training.jobs import TOPK, Mode
from tests.worker_agent import training

pytestmark = pytest.mark.processes

STEPS = 6


def test_ddp_accepts_the_hook_by_its_signature() -> None:
    signature = inspect.signature(hook)
    assert signature.parameters["bucket"].annotation is GradBucket
    assert signature.return_annotation == torch.futures.Future[torch.Tensor]
    assert gradpilot.hook is hook
    assert gradpilot.HookState is HookState


def _gradients_under(rank: int, register: Any, **options: Any) -> list[torch.Tensor]:
    net = Mode("", options=options).wrap()
    register(net)
    seen = []
    for step in range(STEPS):
        net.zero_grad()
        jobs.one_backward(net, rank, step)
        seen.append(training.gradients(net))
    return seen


def _ours(start: Option) -> Any:
    return lambda net: net.register_comm_hook(HookState(controller="off", start=start), hook)


def _theirs(other: Any) -> Any:
    return lambda net: net.register_comm_hook(None, other)


def _beside_torchs_hooks(rank: int) -> dict[str, float]:
    """Return how far our hooks are from torch's own, and from DDP without one."""
    plain = _gradients_under(rank, lambda net: None)

    def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))

    whole = _gradients_under(rank, _ours(DENSE))
    return {
        "no hook": distance(whole, plain),
        "allreduce_hook": distance(
            whole, _gradients_under(rank, _theirs(default_hooks.allreduce_hook))
        ),
        "fp16_compress_hook": distance(
            _gradients_under(rank, _ours(Option("fp16"))),
            _gradients_under(rank, _theirs(default_hooks.fp16_compress_hook)),
        ),
        "scale": max(float(g.abs().max()) for g in plain),
    }


def test_parity_with_torchs_default_hooks() -> None:
    for distances in run_ranks(_beside_torchs_hooks, 2):
        assert distances["no hook"] == 0.0
        assert distances["allreduce_hook"] == 0.0
        # Both round to fp16; ours keeps what was rounded away and sends it a step later.
        assert distances["fp16_compress_hook"] < 2e-3 * distances["scale"]


def _lifecycle(rank: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    # The first bucket attaches, with DDP's lock held: no deadlock where DDP counts what is used.
    torch.manual_seed(3)
    net = DistributedDataParallel(
        jobs.Branches(), bucket_cap_mb=jobs.BUCKET_MB, find_unused_parameters=True
    )
    state = HookState(controller="off", start=TOPK, name="branches")
    net.register_comm_hook(state, hook)
    result["before"] = state.handle is None
    alike = True
    for step in range(jobs.STEPS - 2):
        net.zero_grad()
        jobs.through_branches(net, rank, step)
        alike &= training.same_everywhere(training.digest(training.gradients(net)))
    assert state.handle is not None
    result["alike"] = alike
    result["steps"] = state.handle.step
    result["model"] = state.handle.model
    assert state.handle._pipeline._unused is not None
    result["knows the unused"] = state.handle._pipeline._unused.ignored(
        state.handle._table.slots
    ) == {f"branches.{i}.{kind}" for i in (4,) for kind in ("weight", "bias")}

    # Attached before the first step, by the same call as any other model.
    early = Mode("").wrap()
    state = HookState(controller="off", start=TOPK, name="early")
    early.register_comm_hook(state, hook)
    result["early"] = gradpilot.attach(early) is state.handle

    # As many buckets as layers; a step ends once, at the last one.
    deep = DistributedDataParallel(jobs.stack(11), bucket_cap_mb=0.0001)
    state = HookState(controller="off")
    deep.register_comm_hook(state, hook)
    for step in range(4):
        jobs.one_backward(deep, rank, step)
    assert state.handle is not None
    assert state.handle.layout is not None
    result["deep"] = (state.handle.step, len(state.handle.layout.buckets))
    return result


def test_a_registered_state_attaches_itself() -> None:
    for result in run_ranks(_lifecycle, 2):
        assert result["before"]
        assert result["alike"]
        assert result["steps"] == jobs.STEPS - 2
        assert result["model"] == "branches"
        assert result["knows the unused"]
        assert result["early"]
        steps, buckets = result["deep"]
        assert steps == 4
        assert buckets >= 11


def _raised(net: nn.Module, rank: int) -> str:
    try:
        jobs.one_backward(net, rank, 0)
    except (AttachError, ConfigError) as error:
        return str(error)
    return ""


def _misused(rank: int) -> list[str]:
    texts = []
    shared = HookState(controller="off")
    nets = [Mode("").wrap(), Mode("").wrap()]
    for net in nets:
        net.register_comm_hook(shared, hook)
    texts.append(_raised(nets[0], rank))
    without = Mode("").wrap()
    without.register_comm_hook(None, hook)
    texts.append(_raised(without, rank))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        by_parameter = Mode("").wrap()
    by_parameter.register_comm_hook(HookState(controller="off"), hook)
    texts.append(_raised(by_parameter, rank))
    return texts


def test_a_state_that_cannot_work_says_so_at_the_first_bucket() -> None:
    for shared, without, by_parameter in run_ranks(_misused, 2):
        assert "expected one DDP model with this HookState, found 2" in shared
        assert "expects a gradpilot.HookState as its state, got None" in without
        assert "optimize_ddp = 'python_reducer'" in by_parameter

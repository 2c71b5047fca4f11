"""What is refused: one clear line, before anything is started, and training goes on as it was."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from gradpilot.errors import AttachError, ConfigError
from gradpilot.worker_agent.agent import attach
from tests.ranks import run_ranks
from tests.training import jobs
from tests.worker_agent import training

pytestmark = pytest.mark.processes


def _wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=jobs.BUCKET_MB, **options)


def _hooked() -> nn.Module:
    net = _wrap(jobs.stack())
    net.register_comm_hook(None, allreduce_hook)
    return net


def _hooked_in_cpp() -> nn.Module:
    net = _wrap(jobs.stack())
    net._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)  # type: ignore[no-untyped-call]
    return net


def _attached_twice() -> nn.Module:
    net = _wrap(jobs.stack())
    training.control(net)
    return net


def _mixed_precision() -> nn.Module:
    precision = _MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32)
    return _wrap(jobs.stack(), mixed_precision=precision)


def _optimizer_in_backward() -> nn.Module:
    # Here, in a rank: torch warns of its own torch.jit when this is imported.
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    module = jobs.stack()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.01})
    return _wrap(module)


def _python_reducer() -> nn.Module:
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return _wrap(jobs.stack())


def _all_frozen() -> nn.Module:
    net = _wrap(jobs.stack())
    net.requires_grad_(False)
    return net


def _all_delayed() -> nn.Module:
    module = jobs.stack()
    for name, p in module.named_parameters():
        p.requires_grad_(name.startswith("0."))
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    # Beside a parameter that is not trained: DDP takes its device from what is not delayed.
    return _wrap(
        module, delay_all_reduce_named_params=named, param_to_hook_all_reduce=module[0].weight
    )


def _inside_another() -> nn.Module:
    return nn.Sequential(_wrap(jobs.stack()), nn.Tanh())


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "not wrapped": (jobs.stack, "got Sequential; wrap it first"),
    "inside another module": (_inside_another, "attach its part '0', which is one"),
    "hooked already": (_hooked, "allreduce_hook is registered already"),
    "hooked in C++": (_hooked_in_cpp, "BuiltinCommHookType.ALLREDUCE is registered already"),
    "attached twice": (_attached_twice, "hook is registered already"),
    "native mixed precision": (
        _mixed_precision,
        "_reducer_allreduce_and_upcast_hook is registered already",
    ),
    "optimizer in backward": (_optimizer_in_backward, "step the optimizer after backward"),
    "python reducer": (_python_reducer, "optimize_ddp = 'python_reducer'"),
    "all frozen": (_all_frozen, "whose parameters are all frozen"),
    "all delayed": (_all_delayed, "delay_all_reduce_named_params names every parameter"),
}
IDLE = {"all frozen", "native mixed precision", "optimizer in backward", "all delayed"}
"""Models that cannot train here in any case: two of them need a device with streams, and a model
of which every parameter is delayed fails in torch 2.13."""


def _refuse(rank: int) -> dict[str, tuple[str, bool]]:
    warnings.simplefilter("ignore")
    results = {}
    for case, (make, _) in CASES.items():
        torch.manual_seed(3)
        net = make()
        try:
            attach(net, controller="off")  # type: ignore[arg-type]
        except AttachError as error:
            text = str(error)
        else:
            text = ""
        trains = True
        for step in range(0 if case in IDLE else 3):
            jobs.one_backward(net, rank, step)
            trains &= jobs.finite(net)
        results[case] = text, trains
    return results


@pytest.fixture(scope="module")
def refused() -> list[dict[str, tuple[str, bool]]]:
    """Try all cases in one set of ranks."""
    return run_ranks(_refuse, 2)


@pytest.mark.parametrize("case", CASES)
def test_each_refusal_is_one_line_and_training_goes_on(
    case: str, refused: list[dict[str, tuple[str, bool]]]
) -> None:
    for results in refused:
        text, trains = results[case]
        assert CASES[case][1] in text
        assert "\n" not in text
        assert trains


def _join_by_ranks_left(rank: int) -> tuple[str, bool, str]:
    net = _wrap(jobs.stack())
    training.control(net, jobs.TOPK)
    refused = ""
    try:
        with net.join(divide_by_initial_world_size=False):
            jobs.one_backward(net, rank, 0)
    except ConfigError as error:
        refused = str(error)
    with net.join():
        for step in range(3 + rank):
            jobs.one_backward(net, rank, step)

    # A model that is not managed still may.
    plain = _wrap(jobs.stack())
    with plain.join(divide_by_initial_world_size=False):
        for step in range(3 + rank):
            jobs.one_backward(plain, rank, step)
        inside = ""
        try:
            attach(plain, controller="off")
        except AttachError as error:
            inside = str(error)
    return refused, jobs.finite(net), inside


def test_join_that_divides_by_the_ranks_left_is_refused_where_it_is_entered() -> None:
    for refused, finite, inside in run_ranks(_join_by_ranks_left, 2):
        assert "expects join(divide_by_initial_world_size=True), got False" in refused
        assert "outside join" in inside
        assert finite


def _later_registration(rank: int) -> str:
    net = _wrap(jobs.stack())
    training.control(net, jobs.TOPK)
    try:
        net.register_comm_hook(None, allreduce_hook)
    except RuntimeError as error:
        text = str(error)
    for step in range(3):
        net.zero_grad()
        jobs.one_backward(net, rank, step)
    assert training.same_everywhere(training.digest(training.gradients(net)))
    return text


def test_a_hook_after_ours_is_refused_by_ddp_itself() -> None:
    for text in run_ranks(_later_registration, 2):
        assert "can only be called once" in text


def _copied(rank: int) -> tuple[bool, str, str, bool]:
    """A copy of a managed model is plain DDP, as with every hook, and can be attached."""
    net = _wrap(jobs.stack())
    training.control(net, jobs.TOPK)
    jobs.one_backward(net, rank, 0)
    copied = pickle.loads(pickle.dumps(net))
    state = copied._comm_hooks[0][1]
    other = _wrap(jobs.stack())
    other.register_comm_hook(state, net._comm_hooks[0][0])
    refused = ""
    try:
        jobs.one_backward(other, rank, 1)
    except ConfigError as error:
        refused = str(error)
    plain = jobs.Mode("").wrap()
    plain.module.load_state_dict(net.module.state_dict())
    for model in (copied, plain):
        model.zero_grad()
        jobs.one_backward(model, rank, 1)
    same = torch.equal(training.gradients(copied), training.gradients(plain))
    handle = training.control(copied, jobs.TOPK)
    for step in range(3):
        copied.zero_grad()
        jobs.one_backward(copied, rank, step)
    alike = training.same_everywhere(training.digest(training.gradients(copied)))
    return same, refused, type(state).__name__, alike and handle.step == 3


def test_a_copied_model_is_plain_ddp_and_its_copied_state_says_so() -> None:
    for same, refused, name, managed in run_ranks(_copied, 2):
        assert same
        assert "got a copy of one" in refused
        assert name == "LeftBehind"
        assert managed

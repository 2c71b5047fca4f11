"""Which models can be managed. ``docs/compatibility.md`` has the table, each row with its test.

DDP has modes that take its one communication hook, that never call it, or that call it in another
form. Those are refused here, before anything is started, by one line that says what was expected,
what came and what to do; the model then stays what it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.join import JoinHook
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from gradpilot.errors import AttachError, ConfigError
from gradpilot.worker_agent.hook import Pipeline
from gradpilot.worker_agent.hook_state import HookState, LeftBehind


def ddp_of(model: Module) -> DistributedDataParallel:
    """Return the DDP model that was given, or that ``torch.compile`` was given.

    Raises:
        AttachError: It is something else.
    """
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, DistributedDataParallel):
        return inner
    wraps = ""
    for name, part in inner.named_modules() if isinstance(inner, Module) else ():
        if isinstance(part, DistributedDataParallel):
            wraps = f"; attach its part {name!r}, which is one"
            break
    raise AttachError(
        "attach expects a model wrapped in torch.nn.parallel.DistributedDataParallel, got"
        f" {type(inner).__name__}{wraps or '; wrap it first. Other wrappers are not managed'}"
    )


def check(model: DistributedDataParallel) -> HookState | None:
    """Raise if this DDP model cannot be managed.

    Returns:
        The state under which our own hook is registered already, if it is and waits for its model;
        None if the hook has to be registered.

    Raises:
        AttachError: It cannot; the message says why and what to do.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise AttachError(
            "attach expects a model with a parameter to train, got one whose parameters are all"
            " frozen; attach after one requires gradients"
        )
    if getattr(model, "_use_python_reducer", False):
        raise AttachError(
            "attach expects DDP's own reducer, which hands whole buckets to a hook, got"
            " torch._dynamo.config.optimize_ddp = 'python_reducer'; set it to 'ddp_optimizer'"
            " before the model is wrapped"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()):
        raise AttachError(
            "attach expects a free hook slot, but an optimizer that runs in backward takes it at"
            " the first forward pass; step the optimizer after backward instead"
        )
    if getattr(model, "_delay_all_reduce_all_params", False):
        raise AttachError(
            "attach expects DDP to reduce buckets, but delay_all_reduce_named_params names every"
            " parameter, so it never does; leave parameters out of it"
        )
    if model._join_config.enable and not model._divide_by_initial_world_size:
        raise AttachError(
            "attach expects to be called outside join(divide_by_initial_world_size=False), got"
            " inside; leave the argument out"
        )
    return _slot(model)


def _slot(model: DistributedDataParallel) -> HookState | None:
    for taken, state in getattr(model, "_comm_hooks", ()):
        if isinstance(state, LeftBehind):
            continue  # the list was copied, the registration was not
        if isinstance(state, HookState) and state.handle is None:
            return state
        raise _taken(getattr(taken, "__qualname__", repr(taken)))
    # Hooks of torch that are written in C++ are in no list; only DDP's log knows them.
    name = model._get_ddp_logging_data().get("comm_hook")  # type: ignore[no-untyped-call]
    if name:
        raise _taken(str(name))
    return None


def _taken(name: str) -> AttachError:
    return AttachError(
        f"DDP has room for one communication hook and {name} is registered already;"
        " remove that registration (native mixed precision and optimizers in backward make one)"
    )


@functools.cache
def guard_join() -> None:
    """Make every managed model refuse ``join(divide_by_initial_world_size=False)`` from now on.

    DDP tells no hook how many ranks are left, so the mean would be wrong without a word. The
    refusal comes where ``join`` is entered, before any rank can wait for another.
    """
    original: Callable[..., JoinHook] = DistributedDataParallel.join_hook

    @functools.wraps(original)
    def join_hook(self: DistributedDataParallel, **kwargs: Any) -> JoinHook:
        if not kwargs.get("divide_by_initial_world_size", True) and _managed(self):
            raise ConfigError(
                "a managed model expects join(divide_by_initial_world_size=True), got False, with"
                " which DDP tells no hook how many ranks are left; leave the argument out"
            )
        return original(self, **kwargs)

    DistributedDataParallel.join_hook = join_hook  # type: ignore[method-assign]


def _managed(model: DistributedDataParallel) -> bool:
    return any(
        isinstance(state, HookState | Pipeline) for _, state in getattr(model, "_comm_hooks", ())
    )

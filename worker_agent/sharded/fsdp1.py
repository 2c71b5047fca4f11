"""FSDP1: the communication hook of ``FullyShardedDataParallel``.

FSDP1 calls one hook for all units and does not say which unit it is, so every unit gets a state of
its own after the registration. ``FULL_SHARD`` and ``SHARD_GRAD_OP`` hand over the padded gradient
and room for a shard, ``NO_SHARD`` the gradient alone; hybrid strategies take no hook.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    allreduce_hook,
    reduce_scatter_hook,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from gradpilot.errors import AttachError
from gradpilot.worker_agent.sharded.pipeline import ShardedPipeline
from gradpilot.worker_agent.sharded.slots import Columns, Unit

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass(frozen=True, slots=True, eq=False)
class UnitState:
    """What the hook is called with.

    Attributes:
        pipeline: The gradient path of the model.
        unit: Whose gradient it is.
        default: What FSDP1's own hooks need.
    """

    pipeline: ShardedPipeline
    unit: Unit
    default: DefaultState


def on_gradient(state: UnitState, gradient: Tensor, shard: Tensor | None = None) -> None:
    """Reduce the gradient of one unit; this is what FSDP1 registers."""
    if shard is None:
        state.pipeline.replicate(
            state.unit, gradient, partial(allreduce_hook, state.default, gradient)
        )
        return

    dense = partial(reduce_scatter_hook, state.default, gradient, shard)
    state.pipeline.reduce(state.unit, gradient, shard, state.default.process_group, dense)


def check(model: FullyShardedDataParallel) -> None:
    """Refuse a model whose units take no hook.

    Raises:
        AttachError: Says why.
    """
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if module.sharding_strategy in HYBRID:
            raise AttachError(
                f"FSDP1 takes no communication hook under {module.sharding_strategy.name}; use"
                " fully_shard over the ranks of a node and attach(..., sharding=Sharding("
                "replicas=...)), or train without attach"
            )
        if getattr(module, "_comm_hook", None) is not None:
            raise AttachError("FSDP1 has room for one communication hook, and one is registered")
    if not model.check_is_root():
        raise AttachError("attach the outermost FullyShardedDataParallel module, this one is not")


def find_units(model: FullyShardedDataParallel) -> tuple[tuple[Any, Unit], ...]:
    """Return the modules that hold parameters of their own, with their units."""
    names = {id(module): name for name, module in model.named_modules()}
    found: list[tuple[Any, Unit]] = []
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = getattr(module, "_handle", None)
        if handle is not None:
            name = names[id(module)]
            unit = Unit(name, len(found), _columns(name, handle))
            found.append((module, unit))
    return tuple(found)


def _columns(name: str, handle: Any) -> Callable[[], Columns]:
    shards = handle.world_size if handle.uses_sharded_strategy else 1

    def columns() -> Columns:
        length = -(-handle.flat_param._unpadded_unsharded_size.numel() // shards)
        return ((f"{name}.flat".lstrip("."), length),)

    return columns


def install(
    model: FullyShardedDataParallel,
    units: tuple[tuple[Any, Unit], ...],
    pipeline: ShardedPipeline,
    group: dist.ProcessGroup,
) -> None:
    """Register the hook, with a state for each unit.

    Raises:
        AttachError: There is a hook already, or the first forward pass is over.
    """
    default = DefaultState(group)
    state = UnitState(pipeline, units[0][1], default)
    try:
        model.register_comm_hook(state, on_gradient)
    except AssertionError as refusal:
        raise AttachError(f"FSDP1 takes no communication hook here: {refusal}") from refusal
    for module, unit in units:
        assert module._comm_hook_state is state
        module._comm_hook_state = UnitState(pipeline, unit, default)

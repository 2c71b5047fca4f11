"""FSDP2: puts our reduce-scatter, all-gather and all-reduce into modules made by ``fully_shard``.

Needs torch 2.9: ``set_custom_reduce_scatter`` and ``set_custom_all_gather`` are not in 2.8. Which
parameters a module reduces at once is not public; what is read of it is read in this file alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from gradpilot.errors import AttachError
from gradpilot.worker_agent.sharded.pipeline import ShardedPipeline
from gradpilot.worker_agent.sharded.slots import Columns, Unit
from gradpilot.worker_agent.sharded.weights import WeightGather
from gradpilot.worker_agent.sharded.wire import Allocates
from gradpilot.worker_agent.wire import reduce_scatter_flat

log = logging.getLogger("gradpilot.agent")

NEEDED = ("set_custom_reduce_scatter", "set_custom_all_gather", "set_all_reduce_hook")


class ShardedUnit:
    """What one ``fully_shard`` call made.

    Attributes:
        module: The module, or the first one of several.
        unit: Its identity.
        shard_group: Process group of the shards; None if the parameters are not sharded.
        replica_group: Process group of the replicas of a two-dimensional mesh; None without.
    """

    def __init__(self, module: FSDPModule, group: Any, unit: Unit) -> None:
        self.module = module
        self.unit = unit
        self.shard_group: dist.ProcessGroup | None = getattr(
            group.mesh_info, "shard_process_group", None
        )
        self.replica_group: dist.ProcessGroup | None = getattr(
            group.mesh_info, "replicate_process_group", None
        )
        self._group = group

    @property
    def taken(self) -> str:
        """Return the name of a communication that somebody put here, "" if none."""
        for comm in (self._group._reduce_scatter_comm, self._group._all_gather_comm):
            name = type(comm).__name__
            if name not in ("DefaultReduceScatter", "DefaultAllGather"):
                return name
        hook = self._group._all_reduce_hook
        return "" if hook is None else getattr(hook, "__qualname__", repr(hook))


def find_units(model: nn.Module) -> tuple[ShardedUnit, ...]:
    """Return the units of a model, in the order of its modules.

    Raises:
        AttachError: This torch does not let a communication be replaced, or a module is sharded in
            a way in which it cannot be.
    """
    missing = [name for name in NEEDED if not hasattr(FSDPModule, name)]
    if missing:
        raise AttachError(
            f"FSDP2 of torch {torch.__version__} has no {', '.join(missing)}: managing a sharded"
            " model needs torch 2.9 or newer; train without attach, or update torch"
        )
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[int, ShardedUnit] = {}
    try:
        for name, module in model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            groups = _param_groups(module)
            if len(groups) > 1:
                raise AttachError(
                    f"the parameters of module {name!r} are sharded over several meshes, which"
                    " leaves no place for a communication of ours; train it without attach"
                )
            for group in groups:
                if id(group) not in found:
                    unit = Unit(name, len(found), partial(_columns, group, names))
                    unit.columns()
                    found[id(group)] = ShardedUnit(module, group, unit)
    except AttributeError as missing_part:
        raise AttachError(
            f"FSDP2 of torch {torch.__version__} looks different from what gradpilot knows:"
            f" {missing_part}; train without attach"
        ) from missing_part
    return tuple(found.values())


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # until torch 2.10
    return [] if group is None else [group]


def _columns(group: Any, names: dict[int, str]) -> Columns:
    return tuple(
        (
            f"{names.get(id(p._module_info.module), '?')}.{p._module_info.param_name}".lstrip("."),
            p.padded_sharded_param_size.numel(),
        )
        for p in group.fsdp_params
        if p.sharded_param.requires_grad
    )


class PlanReduceScatter(Allocates):
    """Takes the place of FSDP2's reduce-scatter in one unit.

    Args:
        pipeline: The gradient path of the model.
        unit: The unit.
    """

    def __init__(self, pipeline: ShardedPipeline, unit: Unit) -> None:
        self._pipeline = pipeline
        self._unit = unit

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Leave this rank's shard of the reduced input in the output."""

        def dense() -> None:
            reduce_scatter_flat(output_tensor, input_tensor, group=group, op=op)

        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            # A factor of the user's own, which cannot be read back.
            _say_once("set_gradient_divide_factor makes a reduction of its own: sent uncompressed")
            dense()
        else:
            mean = op == dist.ReduceOp.AVG
            reduce = self._pipeline.reduce
            reduce(self._unit, input_tensor, output_tensor, group, dense, mean=mean)
        return None


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)


def install(
    model: nn.Module,
    units: Sequence[ShardedUnit],
    pipeline: ShardedPipeline,
    *,
    replicas: dist.ProcessGroup | None = None,
    weights: WeightGather | None = None,
) -> None:
    """Put our communication into all units.

    Args:
        model: The root.
        units: Its units.
        pipeline: The gradient path.
        replicas: Ranks that hold the same shard; None without.
        weights: All-gather that leaves parameters out; None for FSDP2's own.
    """
    for sharded in units:
        sharded.module.set_custom_reduce_scatter(
            PlanReduceScatter(pipeline, sharded.unit)  # type: ignore[arg-type]
        )
        if replicas is not None:
            hook = partial(_across_replicas, pipeline, sharded.unit, replicas)
            sharded.module.set_all_reduce_hook(hook)
        if weights is not None:
            sharded.module.set_custom_all_gather(weights.of(sharded.unit))  # type: ignore[arg-type]
    model.register_forward_hook(partial(_watch_backward, pipeline))
    if weights is not None:
        model.register_forward_pre_hook(lambda *_: weights.forward_begins(), prepend=True)
        pipeline.steps.on_end = weights.backward_ended


def _across_replicas(
    pipeline: ShardedPipeline, unit: Unit, replicas: dist.ProcessGroup, shard: Tensor
) -> None:
    def dense() -> None:
        shard.div_(dist.get_world_size(replicas))
        dist.all_reduce(shard, group=replicas)

    pipeline.replicate(unit, shard, dense)


def _watch_backward(pipeline: ShardedPipeline, _: nn.Module, __: object, output: object) -> None:
    """Let the step begin with the outermost backward pass: checkpointed parts run inner ones."""
    begin: Callable[[Tensor], None] = lambda _: pipeline.steps.begin()  # noqa: E731
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(begin)  # type: ignore[no-untyped-call]

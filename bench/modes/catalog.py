"""The modes: how each makes its models, wraps them, and steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.modes.models import Branches, Checkpointed, Mixed, Size, stack

UNEVEN = 1
"""With ``join`` the second rank makes so many steps fewer in every block."""

COMPILER = "aot_eager"
"""Traces and splits the graph by buckets as every backend does, but writes no C++, which
changes nothing in what DDP calls."""

Backward = Callable[[Sequence[nn.Module], Tensor], None]


def one_pass(called: Sequence[nn.Module], data: Tensor) -> None:
    """Run forward and backward of every model."""
    for net in called:
        net(data).float().square().mean().backward()


def accumulated(called: Sequence[nn.Module], data: Tensor) -> None:
    """Run the batch in two halves and synchronise in the second."""
    first, second = data.chunk(2)
    for net in called:
        assert isinstance(net, DistributedDataParallel)
        with net.no_sync():
            net(first).square().mean().backward()
        net(second).square().mean().backward()


def _input_too(called: Sequence[nn.Module], data: Tensor) -> None:
    """Run with an input that has a gradient, which reentrant checkpointing wants."""
    one_pass(called, data.detach().requires_grad_())


def even(net: nn.Module) -> Any:
    """Return a context in which nothing is different."""
    return contextlib.nullcontext()


def joined(net: nn.Module) -> Any:
    """Return DDP's context for ranks that make different numbers of steps."""
    assert isinstance(net, DistributedDataParallel)
    return net.join()


def in_ddp(module: nn.Module, size: Size, own_group: bool = False, **options: Any) -> nn.Module:
    """Return a module in DDP.

    Args:
        module: The module.
        size: Gives the bucket size.
        own_group: Whether it gets a process group of its own, of all ranks; collective.
        **options: Of DDP.
    """
    if own_group:
        options["process_group"] = dist.new_group(list(range(dist.get_world_size())))
    return DistributedDataParallel(module, bucket_cap_mb=size.bucket_mb, **options)


def in_fsdp(module: nn.Module, size: Size) -> nn.Module:
    """Return a module under FSDP2, every block a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.children():
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _itself(net: nn.Module) -> nn.Module:
    return net


def _compiled(net: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(net, backend=COMPILER)
    assert isinstance(compiled, nn.Module)
    return compiled


def _one(size: Size) -> list[nn.Module]:
    return [stack(size)]


def _two_halves(size: Size) -> list[nn.Module]:
    return [stack(size, size.blocks // 2) for _ in range(2)]


@dataclass(frozen=True, slots=True)
class Mode:
    """A way in which people train.

    Attributes:
        what: One line for people, in Markdown.
        modules: Makes the models; called with the seed set.
        wrap: Makes of a model what is attached.
        call: Makes of that what a step calls.
        backward: Forward and backward passes of a step.
        within: A context around the steps of a block.
        uneven: Whether the second rank makes ``UNEVEN`` steps fewer in a block.
        planned: Whether controllers plan such models; if not, the handle counts as frozen.
    """

    what: str
    modules: Callable[[Size], list[nn.Module]] = _one
    wrap: Callable[[nn.Module, Size], nn.Module] = in_ddp
    call: Callable[[nn.Module], nn.Module] = _itself
    backward: Backward = one_pass
    within: Callable[[nn.Module], Any] = even
    uneven: bool = False
    planned: bool = True


def _ddp(what: str, **options: Any) -> Mode:
    return Mode(what, wrap=partial(in_ddp, **options))


MODES = {
    "plain": Mode("nothing special"),
    "bucket_view": _ddp("`gradient_as_bucket_view`", gradient_as_bucket_view=True),
    "static_graph": _ddp("`static_graph`", static_graph=True),
    "find_unused": Mode(
        "`find_unused_parameters`, ranks use different branches",
        lambda size: [Branches(size)],
        partial(in_ddp, find_unused_parameters=True),
    ),
    "no_sync": Mode("accumulation: `no_sync`, then a synchronised pass", backward=accumulated),
    "checkpointing": Mode(
        "activation checkpointing, not reentrant", lambda size: [Checkpointed(size, False)]
    ),
    "checkpointing_reentrant": Mode(
        "activation checkpointing, reentrant",
        lambda size: [Checkpointed(size, True)],
        backward=_input_too,
    ),
    "mixed_dtypes": Mode("float32, float64 and bfloat16 in one model", lambda size: [Mixed(size)]),
    "join": Mode("`join()`, uneven inputs", within=joined, uneven=True),
    "compile": Mode(f"`torch.compile`, backend `{COMPILER}`", call=_compiled),
    "two_models": Mode("two models of half the size", _two_halves),
    "own_group": _ddp("a process group other than the default one", own_group=True),
    "fsdp2": Mode("FSDP2 (`fully_shard`), option fixed by the job", wrap=in_fsdp, planned=False),
}
"""By name in the rows."""

"""An all-gather of parameters that leaves some shards out and works with older values of them.

SkipReduce's form for sharded models: a rank that will not contribute to the gradient of a shard
does not need the newest weights of it. In the published code what is not received is whatever lies
in the buffer. Here it is a value that the rank received at most ``refresh_steps`` steps ago: the
order of the ring stays for so many steps, the first gather of each such epoch is in full, and the
shards that will be left out until the next one are copied. That costs the memory of S of N shards.

Parameters are owned by one rank each, so optimizer, checkpoints and evaluation see no old value:
only a forward pass with gradients, until its backward pass has ended, may gather in part.

Letters: N ranks of the shard group, S skipped steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gradpilot.worker_agent.collectives.reduction import SUM
from gradpilot.worker_agent.peers import run_steps
from gradpilot.worker_agent.sharded.pipeline import ShardedPipeline
from gradpilot.worker_agent.sharded.ring import gather_schedule, omitted_shards, ring_order
from gradpilot.worker_agent.sharded.slots import Unit
from gradpilot.worker_agent.sharded.wire import Allocates
from gradpilot.worker_agent.wire import all_gather_flat


class WeightGather:
    """Gathers the parameters of all units of one model.

    Args:
        pipeline: The gradient path, whose order of the ring is followed.
        training: Returns whether the model is being trained.

    Attributes:
        partial_gathers: Gathers that left shards out.
        bytes_received: Bytes of shards received, own ones not counted.
        bytes_in_full: What they would have been without skipping.
    """

    def __init__(self, pipeline: ShardedPipeline, training: Callable[[], bool]) -> None:
        self.pipeline = pipeline
        self.partial_gathers = 0
        self.bytes_received = 0
        self.bytes_in_full = 0
        self._training = training
        self._under_way = False
        self._kept: dict[str, tuple[int, dict[int, Tensor]]] = {}

    def of(self, unit: Unit) -> PlanAllGather:
        """Return what takes the place of FSDP2's all-gather in one unit."""
        return PlanAllGather(self, unit)

    def forward_begins(self) -> None:
        """Note that the model's forward pass begins."""
        self._under_way = torch.is_grad_enabled() and self._training()

    def backward_ended(self) -> None:
        """Note that the backward pass has ended: whoever gathers now wants all of it."""
        self._under_way = False

    def gather(
        self, unit: Unit, output: Tensor, own: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        """Fill ``output``, of which ``own`` is this rank's part; all ranks alike."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        missing = own.nbytes * (ranks - 1)
        self.bytes_in_full += missing
        if not (self._under_way and self.pipeline.skips(unit, ranks)):
            self.bytes_received += missing
            work: dist.Work | None = all_gather_flat(output, own, group=group, async_op=async_op)
            return work
        option = self.pipeline.given.option
        at = self.pipeline.at(unit, rank, ranks)
        order = ring_order(at, option.rotation)
        rows = output.view(ranks, -1)
        epoch, kept = self._kept.get(unit.name, (-1, {}))
        if epoch != at.step:
            self.bytes_received += missing
            all_gather_flat(output, own, group=group)
            omitted = omitted_shards(order, rank, option.skip)
            self._kept[unit.name] = (at.step, {shard: rows[shard].clone() for shard in omitted})
            return None
        schedule = gather_schedule(order, rank, option.skip)
        run_steps(group, output, schedule, SUM, dist.get_backend(group) == "gloo")
        for shard, older in kept.items():
            rows[shard].copy_(older)
        self.partial_gathers += 1
        self.bytes_received += missing - option.skip * own.nbytes
        return None


class PlanAllGather(Allocates):
    """Takes the place of FSDP2's all-gather in one unit."""

    def __init__(self, weights: WeightGather, unit: Unit) -> None:
        self._weights = weights
        self._unit = unit

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the parameters of one unit."""
        return self._weights.gather(self._unit, output_tensor, input_tensor, group, async_op)

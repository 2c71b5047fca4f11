"""The gradient path of a sharded model: what happens to a unit between backward and optimizer.

The framework hands over one unit's local gradients and wants this rank's shard of their mean. It is
called in the thread that runs backward, in the same order on all ranks, and works there with
blocking calls on the framework's own process group, as the framework itself does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from gradpilot.worker_agent.buckets import Slot
from gradpilot.worker_agent.collectives.skipping import min_skip_elements
from gradpilot.worker_agent.compressors.base import At, leave_residual_
from gradpilot.worker_agent.finite import poison_without_waiting_
from gradpilot.worker_agent.plan import Given
from gradpilot.worker_agent.sharded.exchange import DENSE_SHARDED, ShardedOption
from gradpilot.worker_agent.sharded.slots import Unit
from gradpilot.worker_agent.sharded.steps import Step, Steps
from gradpilot.worker_agent.sharded.wire import ShardWire
from gradpilot.worker_agent.statistics import squared_norm
from gradpilot.worker_agent.wire import Stamp, Timing

Dense = Callable[[], object]
"""Does, with the tensors at hand, what the framework would do without us."""


class ShardedPipeline:
    """The gradient path of one sharded model on one rank.

    Args:
        given: Option of the exchange inside the shard group.
        steps: The model's backward passes.
        seed: Seed of every random choice, the same on all ranks.
        epoch_steps: Steps for which the order of the ring stays, so that the weights that a rank
            leaves out are those whose gradients it omits; 1 without skipping of weights.
        replicated: What replicas of a shard are averaged by, and their group; None without.
    """

    def __init__(
        self,
        given: ShardedOption,
        steps: Steps,
        seed: int,
        *,
        epoch_steps: int = 1,
        replicated: tuple[Given, dist.ProcessGroup] | None = None,
    ) -> None:
        self.given = given
        self.steps = steps
        self._seed = seed
        self._epoch_steps = epoch_steps
        self._replicated = replicated
        self._detached = False
        self._wires: dict[dist.ProcessGroup, ShardWire] = {}

    def reduce(
        self,
        unit: Unit,
        gradient: Tensor,
        shard: Tensor,
        group: dist.ProcessGroup,
        dense: Dense,
        *,
        mean: bool = True,
    ) -> None:
        """Leave this rank's shard of the reduced gradient in ``shard``; all ranks alike.

        Args:
            unit: Whose gradient it is.
            gradient: 1-D local gradient, n elements shard by shard; overwritten.
            shard: 1-D, n / N elements.
            group: Process group of the shards.
            dense: Reduces ``gradient`` to ``shard``.
            mean: Whether the mean is wanted, else the sum.
        """
        step, wire = self.steps.open(unit), self._wire(group)
        slot = unit.slot(wire.world_size, gradient.dtype)
        usual = _is_usual(step, slot, gradient)
        given = self._given(unit, wire.world_size) if usual else DENSE_SHARDED
        step.asks = step.asks or not given.spreads
        looked = step.looked and self._replicated is None
        if looked:
            step.gradient_sq += squared_norm(gradient)
        if usual:
            self.steps.residuals.place(slot)
        if given.exchange is None:
            if usual:
                self._send_residual(slot, gradient)
            timing = _timed(dense, "reduce_scatter", gradient)
        else:
            timing = self._exchange(given, unit, slot, gradient, shard, wire)
            if not mean:
                shard.mul_(wire.world_size)
        if looked:
            step.mean_sq += squared_norm(shard) / (1 if mean else wire.world_size**2)
        self.steps.note(step, slot, timing, shard, gradient.numel())

    def replicate(self, unit: Unit, shard: Tensor, dense: Dense) -> None:
        """Average a shard over its replicas, in place; all ranks alike.

        Args:
            unit: Whose shard it is.
            shard: 1-D, this rank's shard, reduced over the shard group.
            dense: Averages ``shard`` over the replicas.
        """
        assert self._replicated is not None
        given, group = self._replicated
        step = self.steps.open(unit)
        slot = unit.slot(1, shard.dtype)
        usual = _is_usual(step, slot, shard)
        if step.looked:
            step.gradient_sq += squared_norm(shard)
        if usual:
            self.steps.residuals.place(slot)
        cold = given.option.skip > 0 and not self.steps.warm_up.warm
        if not usual or cold or self._detached:
            if usual:
                self._send_residual(slot, shard)
            timing = _timed(dense, "all_reduce", shard)
        else:
            timing = self._average(given, slot, shard, self._wire(group))
        if step.looked:
            step.mean_sq += squared_norm(shard)
        self.steps.note(step, slot, timing, shard, shard.numel())

    def detach(self) -> None:
        """Leave everything to the framework from now on; what was kept goes with the next step."""
        self.given = DENSE_SHARDED
        self._detached = True

    def at(self, unit: Unit, rank: int, world_size: int) -> At:
        """Return where an exchange of a unit takes place: of its weights and of their gradients."""
        epoch = self.steps.number - self.steps.number % self._epoch_steps
        return At(rank, world_size, epoch, unit.name, self._seed)

    def skips(self, unit: Unit, ranks: int) -> bool:
        """Return whether steps are left out for a unit now: not of small ones, not until warm."""
        elements = ranks * sum(length for _, length in unit.columns())
        skip = self.given.option.skip > 0
        return skip and self.steps.warm_up.warm and elements >= min_skip_elements(ranks)

    # --- stages --------------------------------------------------------------------------------

    def _given(self, unit: Unit, ranks: int) -> ShardedOption:
        skips = self.given.option.skip > 0
        return DENSE_SHARDED if skips and not self.skips(unit, ranks) else self.given

    def _send_residual(self, slot: Slot, gradient: Tensor) -> None:
        residuals = self.steps.residuals
        if slot in residuals:
            residuals.add_to_(slot, gradient)
            residuals.stage(slot, None)

    def _exchange(
        self,
        given: ShardedOption,
        unit: Unit,
        slot: Slot,
        gradient: Tensor,
        shard: Tensor,
        wire: ShardWire,
    ) -> Timing:
        """Reduce a gradient to a shard under an option of ours."""
        assert given.exchange is not None
        where = self.at(unit, wire.rank, wire.world_size)
        at = replace(where, feedback=given.feedback, out=shard)
        corrected = self._corrected(slot, gradient, given.feedback)
        estimate, timing = wire.run(given.exchange(corrected, at), given.option, at)
        if given.feedback:
            self.steps.residuals.stage(slot, leave_residual_(corrected, estimate))
        return timing

    def _average(self, given: Given, slot: Slot, shard: Tensor, wire: ShardWire) -> Timing:
        """Average a shard over its replicas by a compressor, as the hook of DDP does a bucket."""
        memories = self.steps.memories
        at = At(
            rank=wire.rank,
            world_size=wire.world_size,
            step=self.steps.number,
            bucket=slot.key,
            seed=self._seed,
            shapes=slot.shapes,
            feedback=given.feedback,
            memory=memories.recall(slot.key, given.owner),
            out=shard if given.feedback else None,
        )
        corrected = self._corrected(slot, shard, given.feedback)
        estimate, timing = wire.run(given.compressor.rounds(corrected, at), given.option, at)
        if given.feedback:
            self.steps.residuals.stage(slot, leave_residual_(corrected, estimate))
        memories.stage(slot.key, given.owner, estimate.memory)
        if estimate.mean.data_ptr() != shard.data_ptr():
            shard.copy_(estimate.mean)
        return timing

    def _corrected(self, slot: Slot, gradient: Tensor, feedback: bool) -> Tensor:
        """Return gradient plus residual, NaN everywhere if it is not finite."""
        if feedback:
            corrected = self.steps.residuals.corrected(slot, gradient)
        else:
            self._send_residual(slot, gradient)
            corrected = gradient
        poison_without_waiting_(corrected)
        return corrected

    def _wire(self, group: dist.ProcessGroup) -> ShardWire:
        if group not in self._wires:
            self._wires[group] = ShardWire(group)
        return self._wires[group]


def _is_usual(step: Step, slot: Slot, gradient: Tensor) -> bool:
    """Return whether a gradient is that of the whole unit, for the first time in this step.

    A parameter without a gradient is left out by the framework, and nothing tells which one; and a
    unit that is used twice in a forward pass is reduced twice. Then the gradient is sent whole, and
    the residual waits.
    """
    first = slot.key not in step.seen
    step.seen.add(slot.key)
    return first and slot.bucket.elements == gradient.numel()


def _timed(dense: Dense, collective: str, payload: Tensor) -> Timing:
    start = time.monotonic()
    dense()
    return Timing(stamps=[Stamp(collective, payload.nbytes, 0, time.monotonic() - start)])

"""The backward passes of a sharded model: where they begin and end, and what takes effect then.

A step is one backward pass that reduced something. Residuals and memories that were made in it take
effect at its end if all gradients were finite on all ranks, else those of the step before stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gradpilot.protos.messages import Report
from gradpilot.worker_agent.buckets import Slot
from gradpilot.worker_agent.error_feedback import ResidualStore
from gradpilot.worker_agent.finite import finite_flag
from gradpilot.worker_agent.loss_scale import LossScale
from gradpilot.worker_agent.memory import MemoryStore
from gradpilot.worker_agent.reporting import WindowRecorder
from gradpilot.worker_agent.sharded.slots import Unit
from gradpilot.worker_agent.sharded.warm_up import WarmUp
from gradpilot.worker_agent.wire import Timing


@dataclass(slots=True)
class Step:
    """One backward pass.

    Attributes:
        task: Autograd's id of it; a pass that failed never ends, so the next one tells by this.
        looked: Whether the warm-up looks at it.
        guarded: Whether anything kept depends on its being finite.
        asks: Whether what this rank saw does not tell whether all ranks' gradients were finite.
        finite: Whether what this rank saw was finite, a flag a unit.
        seen: Fingerprints of the slots reduced so far.
        gradient_sq: ||own gradient||^2 so far.
        mean_sq: ||own part of the mean||^2 so far.
        last_ready: When the newest unit came; 0 before the first.
    """

    task: int
    looked: bool
    guarded: bool
    asks: bool = False
    finite: list[Tensor] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    gradient_sq: float = 0.0
    mean_sq: float = 0.0
    last_ready: float = 0.0


class Steps:
    """The steps of one model on one rank.

    Args:
        groups: Process groups over which ranks agree, one after the other: shards, then replicas.
        means: By what the sums over all those ranks of ||gradient||^2 and of ||mean||^2 are divided
            to give the mean over gradients and the whole mean's.
        device: Where the gradients are.
        feedback: Whether the option keeps a residual.
        recorder: Takes the stamps.
        send_report: Takes finished window reports; must not block.
        loss_scale: Scale of the gradients.
        warm_up: Says whether contributions may be skipped.
        spoil: Makes this rank's gradients non-finite, as another rank's are.

    Attributes:
        number: Steps so far.
        nonfinite: Those that were not finite.
        residuals: What was not sent yet.
        memories: What compressors remember.
        on_end: Called at the end of every backward pass that reduced something.
        wire_bytes: Payload bytes handed to collectives.
        dense_bytes: What they would have been at 4 bytes an element.
    """

    def __init__(
        self,
        *,
        groups: Sequence[dist.ProcessGroup],
        means: tuple[int, int],
        device: torch.device,
        feedback: bool,
        recorder: WindowRecorder,
        send_report: Callable[[Report], None],
        loss_scale: LossScale,
        warm_up: WarmUp,
        spoil: Callable[[], None],
    ) -> None:
        self.number = 0
        self.nonfinite = 0
        self.residuals = ResidualStore()
        self.memories = MemoryStore()
        self.loss_scale = loss_scale
        self.warm_up = warm_up
        self.on_end: Callable[[], None] | None = None
        self.wire_bytes = 0
        self.dense_bytes = 0
        self._groups = groups
        self._means = means
        self._device = device
        self._feedback = feedback
        self._recorder = recorder
        self._send_report = send_report
        self._spoil = spoil
        self._current: Step | None = None

    def begin(self) -> None:
        """Open a step, if none is open in this backward pass; call from within one."""
        task = int(torch._C._current_graph_task_id())
        if self._current is not None:
            if self._current.task == task:
                return
            self._forget()  # of a pass that raised halfway
        factor = self.loss_scale.look()
        if factor != 1.0:
            self.residuals.rescale(factor)
            self.memories.rescale(factor)
        looked = self.warm_up.wants(self.number)
        kept = self.residuals.elements > 0 or bool(self.memories)
        self._current = step = Step(task, looked, guarded=looked or kept or self._feedback)
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, step))

    def open(self, unit: Unit) -> Step:
        """Return the step under way; a unit's gradient has come."""
        if self._current is None:
            self.begin()
        step = self._current
        assert step is not None
        now = time.monotonic()
        if not step.last_ready:
            self._recorder.begin_step(self.number, now)
        step.last_ready = now
        self._recorder.bucket_ready(unit.index, now)
        return step

    def note(self, step: Step, slot: Slot, timing: Timing, result: Tensor, elements: int) -> None:
        """Note what a unit cost, and whether its result is finite if that matters.

        Args:
            step: The step.
            slot: What was reduced.
            timing: What it cost.
            result: What came out on this rank.
            elements: Elements that went in.
        """
        if step.guarded:
            step.finite.append(finite_flag(result))
        self.wire_bytes += timing.wire_bytes
        self.dense_bytes += 4 * elements
        # Host clocks tell nothing of what a device does on its own.
        timed = 1.0 if self._device.type == "cpu" else 0.0
        self._recorder.bucket_done(
            slot.index,
            timed * timing.compress_seconds,
            timed * timing.decompress_seconds,
            timed * timing.wire_seconds,
            timing.wire_bytes,
        )

    def _end(self, step: Step) -> None:
        """Close a step; autograd calls this when the backward pass is over."""
        if self._current is not step:
            return
        self._current = None
        if not step.last_ready:
            return  # nothing was reduced: gradients are being accumulated
        if step.guarded:
            self._settle(step)
        report = self._recorder.end_step(step.last_ready, time.monotonic())
        if report is not None:
            self._send_report(report)
        self.number += 1
        if self.on_end is not None:
            self.on_end()

    def _settle(self, step: Step) -> None:
        """Let a step take effect, or not: all ranks alike."""
        finite = agreed = bool(torch.stack(step.finite).all())
        if step.asks or step.looked:
            facts = [0.0 if finite else 1.0, step.gradient_sq, step.mean_sq]
            shared = torch.tensor(facts, dtype=torch.float64, device=self._device)
            for group in self._groups:
                dist.all_reduce(shared, group=group)
            spoilt, gradient_sq, mean_sq = shared.tolist()
            agreed = spoilt == 0.0
            if step.looked:
                gradients, copies = self._means
                self.warm_up.look(self.number, gradient_sq / gradients, mean_sq / copies)
        if agreed:
            self.residuals.commit()
            self.memories.commit()
            return
        self._forget()
        self.nonfinite += 1
        if finite:
            # The owners of other shards know of it; so must whoever looks at this rank's alone.
            self._spoil()

    def _forget(self) -> None:
        self.residuals.discard()
        self.memories.discard()

"""Requests that a compressor yields and the schedules that can carry an all-reduce.

Neither does I/O. A driver (``worker_agent.wire`` over a process group, ``worker_agent.virtual``
over N virtual ranks in one process) executes requests and sends the reply back into the compressor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from gradpilot.registry import Registry


@dataclass(slots=True, eq=False)
class AllReduce:
    """Sum ``payload`` over ranks; the reply is the sum, bit-identical on all ranks.

    A compressor that wants a mean divides before it asks: a sum of 16-bit values overflows where
    their mean would not.

    Attributes:
        payload: 1-D contiguous tensor, same numel and dtype on all ranks. Consumed: it may be
            overwritten, and the reply may share its storage.
        skippable: Whether steps of a ring schedule may be left out. False for anything but gradient
            values (norms, scores, counts).
        omitted: Set by the driver before it replies: the parts of the payload that this rank did
            not contribute and that error feedback shall keep. Empty unless the option skips with
            feedback.
    """

    kind: ClassVar[str] = "all_reduce"
    payload: Tensor
    skippable: bool = True
    omitted: tuple[slice, ...] = field(default=(), init=False)


@dataclass(slots=True, eq=False)
class AllGather:
    """Collect ``payload`` of every rank; the reply has shape ``(world_size, numel)``.

    Attributes:
        payload: 1-D contiguous tensor, same numel and dtype on all ranks.
    """

    kind: ClassVar[str] = "all_gather"
    payload: Tensor


@dataclass(slots=True, eq=False)
class Broadcast:
    """Send ``payload`` of rank ``source`` to all; the reply is that tensor on every rank.

    Attributes:
        payload: 1-D contiguous tensor, same numel and dtype on all ranks; contents matter on
            ``source`` only and are overwritten elsewhere.
        source: Rank within the group, the same on all ranks.
    """

    kind: ClassVar[str] = "broadcast"
    payload: Tensor
    source: int


Collective = AllReduce | AllGather | Broadcast


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule on one rank: send one slice, receive one slice.

    Attributes:
        to: Rank to send to.
        send: Number of the slice to send.
        source: Rank to receive from.
        receive: Number of the slice to receive.
        accumulate: Add what is received to the own slice (reduce) or overwrite it (gather).
    """

    to: int
    send: int
    source: int
    receive: int
    accumulate: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """An all-reduce as point-to-point steps of one rank, in order.

    A payload is cut into ``slices`` slices of equal length (``slice_bounds``). Ranks may leave out
    contributions: the result equals an all-reduce over payloads whose omitted slices are zero, and
    every rank ends with the same bits.

    Attributes:
        slices: Number of slices.
        steps: Steps of this rank.
        omitted: Slices that this rank does not contribute.
        contributions: Ranks that contribute to a slice, the same for every slice.
    """

    slices: int
    steps: tuple[Step, ...]
    omitted: tuple[int, ...]
    contributions: int


def slice_bounds(numel: int, slices: int) -> tuple[slice, ...]:
    """Cut ``numel`` elements into equal slices, the last ones shorter or empty (no padding)."""
    length = -(-numel // slices)
    return tuple(slice(min(i * length, numel), min((i + 1) * length, numel)) for i in range(slices))


class ScheduleBuilder(Protocol):
    """Builds the schedule of one rank; the same arguments on all ranks give a matching set."""

    def __call__(self, rank: int, world_size: int, *, skip: int = 0, shift: int = 0) -> Schedule:
        """Return the schedule of ``rank``.

        Args:
            rank: This rank.
            world_size: Ranks N.
            skip: Steps S to leave out, clamped to 0 .. N - 1.
            shift: Rotation of the slices, 0 .. N - 1, the same on all ranks.
        """
        ...


SCHEDULES: Registry[ScheduleBuilder] = Registry("collective", "gradpilot.worker_agent.collectives")

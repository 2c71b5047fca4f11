"""Requests that a compressor yields and the schedules that can carry an all-reduce.

Neither does I/O. A driver (``worker_agent.wire`` over a process group, ``worker_agent.virtual``
over N virtual ranks in one process) executes requests and sends the reply back into the compressor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.registry import Registry
from gradpilot.worker_agent.collectives.reduction import SUM, Reduction


@dataclass(slots=True, eq=False)
class AllReduce:
    """Combine ``payload`` over ranks; the reply is the result, bit-identical on all ranks.

    A compressor that wants a mean divides before it asks: a sum of 16-bit values overflows where
    their mean would not.

    Attributes:
        payload: 1-D contiguous tensor, same numel and dtype on all ranks. Consumed: it may be
            overwritten, and the reply may share its storage.
        skippable: Whether steps of a schedule may be left out. False for anything but gradient
            values (norms, scores, counts).
        reduction: How two payloads combine. One that the backend lacks is carried by the ring
            where the option says ``native``.
        scope: Ranks that take part: ``all``, those of one ``node``, or one for each node
            (``across``); for ``hierarchical`` only.
        omitted: Set by the driver before it replies: the parts of the payload that this rank did
            not contribute and that error feedback shall keep. Empty unless the option skips with
            feedback.
    """

    kind: ClassVar[str] = "all_reduce"
    payload: Tensor
    skippable: bool = True
    reduction: Reduction = SUM
    scope: str = "all"
    omitted: tuple[slice, ...] = field(default=(), init=False)


@dataclass(slots=True, eq=False)
class AllGather:
    """Collect ``payload`` of every rank; the reply has shape ``(world_size, numel)``.

    For payloads whose length differs between ranks see ``collectives.gather``.

    Attributes:
        payload: 1-D contiguous tensor, same numel and dtype on all ranks.
        scope: See ``AllReduce``.
    """

    kind: ClassVar[str] = "all_gather"
    payload: Tensor
    scope: str = "all"


@dataclass(slots=True, eq=False)
class Broadcast:
    """Send ``payload`` of rank ``source`` to all; the reply is that tensor on every rank.

    Attributes:
        payload: 1-D contiguous tensor, same numel and dtype on all ranks; contents matter on
            ``source`` only and are overwritten elsewhere.
        source: Rank within the scope, the same on all ranks.
        scope: See ``AllReduce``.
    """

    kind: ClassVar[str] = "broadcast"
    payload: Tensor
    source: int
    scope: str = "all"


@dataclass(slots=True, eq=False)
class ReduceScatter:
    """Sum ``payload`` over ranks and leave each rank its part: the reply has numel / N elements.

    Attributes:
        payload: 1-D contiguous tensor whose numel N divides, same numel and dtype on all ranks;
            rank r gets part r. Consumed.
        scope: See ``AllReduce``.
    """

    kind: ClassVar[str] = "reduce_scatter"
    payload: Tensor
    scope: str = "all"


@dataclass(slots=True, eq=False)
class AllToAll:
    """Send part j of ``payload`` to rank j; the reply has shape ``(world_size, numel / N)``.

    Attributes:
        payload: 1-D contiguous tensor whose numel N divides, same numel and dtype on all ranks;
            row i of the reply is this rank's part of rank i's payload.
        scope: See ``AllReduce``.
    """

    kind: ClassVar[str] = "all_to_all"
    payload: Tensor
    scope: str = "all"


Collective = AllReduce | AllGather | Broadcast | ReduceScatter | AllToAll


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a schedule on one rank: send slices to one peer, receive slices from one.

    Attributes:
        to: Rank to send to; any if nothing is sent.
        send: Numbers of the slices to send, in the order in which the peer receives them.
        source: Rank to receive from; any if nothing is received.
        receive: Numbers of the slices to receive.
        accumulate: Combine what is received with the own slices (reduce) or overwrite them
            (gather).
    """

    to: int
    send: tuple[int, ...]
    source: int
    receive: tuple[int, ...]
    accumulate: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """An all-reduce as point-to-point steps of one rank, in order.

    A payload is cut into ``slices`` slices of equal length (``slice_bounds``). Ranks may leave out
    contributions: the result equals an all-reduce over payloads whose omitted slices are zero, and
    every rank ends with the same bits. All ranks have the same number of steps.

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
            skip: Reduce steps to leave out, clamped to 0 .. ``most_skipped``.
            shift: Rotation of the roles, 0 .. N - 1, the same on all ranks.
        """
        ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to carry an all-reduce by point-to-point messages.

    Attributes:
        build: Makes the schedule of one rank.
        most_skipped: Returns how many reduce steps N ranks can leave out at most.
        source: Paper or textbook name, for people.
    """

    build: ScheduleBuilder
    most_skipped: MostSkipped
    source: str


class MostSkipped(Protocol):
    """Says how many reduce steps can be left out."""

    def __call__(self, world_size: int) -> int:
        """Return the greatest ``skip`` for ``world_size`` ranks."""
        ...


SCHEDULES: Registry[Algorithm] = Registry("collective", "gradpilot.worker_agent.collectives")


def carriers(exchange: str) -> tuple[str, ...]:
    """Return the values of ``Option.collective`` that can carry an exchange.

    Args:
        exchange: ``all_reduce``, ``all_gather`` or ``all_to_all``.

    Raises:
        ConfigError: There is no such exchange.
    """
    if exchange == "all_reduce":
        return ("native", *SCHEDULES.names(), "hierarchical")
    if exchange == "all_gather":
        return ("allgather", "hierarchical")
    if exchange == "all_to_all":
        return ("alltoall",)
    raise ConfigError(f"exchange must be all_reduce, all_gather or all_to_all, got {exchange!r}")

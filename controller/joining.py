"""Joins what single ranks saw of the same collective.

A rank's collective time includes waiting for the slowest peer. ``(step, bucket, round)`` name the
same operation on all ranks: the minimum over ranks is transfer, the rest is straggling.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradpilot.policies.base import Operation
from gradpilot.protos.messages import WireSample

PENDING = 4096
"""Operations that may wait for further ranks at once."""

KINDS = 32
"""Kinds (collective, bytes, skip) that are remembered; the least recently seen goes first."""

PER_KIND = 24
"""Operations remembered of one kind, so that a frequent kind cannot push out a rare one."""

PLACES = 8192
"""(bucket, round) whose waits are remembered; the least recently seen goes first."""

PER_PLACE = 8
"""Waits remembered of one of them."""

LATE_MEMORY = 32
"""Operations over which the lateness of a rank is averaged."""

MAX_AGE_SECONDS = 1800.0
"""Older operations say nothing about the link of today."""

_Key = tuple[int, int, int]
_Kind = tuple[str, int, int]


@dataclass(slots=True)
class _Pending:
    kind: _Kind
    since: float
    seconds: dict[int, float] = field(default_factory=dict)
    overlapped: float = math.inf


@dataclass(frozen=True, slots=True)
class _Joined:
    step: int
    kind: _Kind
    transfer: float
    straggle: float
    received: float
    complete: bool
    overlapped: float


class OperationJoiner:
    """Recent collectives of one run, joined over ranks. Memory is bounded."""

    def __init__(self) -> None:
        self._pending: OrderedDict[_Key, _Pending] = OrderedDict()
        self._done: OrderedDict[_Key, None] = OrderedDict()
        self._joined: OrderedDict[_Kind, deque[_Joined]] = OrderedDict()
        self._waits: OrderedDict[tuple[int, int], deque[tuple[int, float]]] = OrderedDict()
        self._late: dict[int, tuple[int, float]] = {}

    def add(self, rank: int, samples: Iterable[WireSample], now: float, expected: int) -> None:
        """Take the samples of one rank.

        Args:
            rank: Who saw them.
            samples: What it saw.
            now: Monotonic seconds.
            expected: Ranks that will report; an operation is complete when all have.
        """
        for sample in samples:
            key = (sample.step, sample.bucket, sample.round)
            if key in self._done:
                continue
            kind = (sample.collective, sample.bytes, sample.skip)
            pending = self._pending.setdefault(key, _Pending(kind, now))
            if pending.kind[::2] != kind[::2]:  # not the same operation after all
                self._finish(key, None)
                continue
            pending.seconds[rank] = sample.seconds
            pending.overlapped = min(pending.overlapped, sample.overlapped_seconds)
            if len(pending.seconds) >= expected:
                self._finish(key, now, complete=True)
        while len(self._pending) > PENDING:
            self._close_one(next(iter(self._pending)), now, expected)

    def close(self, now: float, seconds: float, expected: int) -> None:
        """Give up waiting for ranks that did not report within ``seconds``."""
        for key, pending in list(self._pending.items()):
            if now - pending.since < seconds:
                break  # in order of arrival
            self._close_one(key, now, expected)

    def clear(self) -> None:
        """Forget everything."""
        self._pending.clear()
        self._done.clear()
        self._joined.clear()
        self._waits.clear()
        self._late.clear()

    def straggle(self, since_step: int) -> float:
        """Return what the median rank waits in the collectives of a step for slower ranks, seconds.

        Joined per operation: over a window, ranks that are late in turn have equal medians.

        Args:
            since_step: Earlier steps do not count, such as those under another plan.
        """
        total = 0.0
        for waits in self._waits.values():
            seconds = [wait for step, wait in waits if step >= since_step]
            total += statistics.median(seconds) if seconds else 0.0
        return total

    def slowest(self) -> tuple[int, float]:
        """Return the rank that the others wait for most and how late it is; (-1, 0) if unknown.

        Who comes last to a collective waits least in it, so a rank is late by the longest time of
        all less its own; of that the moving average over ``LATE_MEMORY`` operations.
        """
        known = {rank: late for rank, (count, late) in self._late.items() if count >= PER_PLACE}
        rank = max(known, key=lambda r: (known[r], -r), default=-1)
        return (rank, known[rank]) if rank >= 0 and known[rank] > 0 else (-1, 0.0)

    def recent(self, now: float) -> tuple[Operation, ...]:
        """Return the joined operations, oldest first."""
        kept = [j for kind in self._joined.values() for j in kind]
        kept = [j for j in kept if now - j.received <= MAX_AGE_SECONDS]
        kept.sort(key=lambda j: (j.received, j.step))
        return tuple(
            Operation(
                step=j.step,
                collective=j.kind[0],
                bytes=j.kind[1],
                skip=j.kind[2],
                transfer_seconds=j.transfer,
                straggle_seconds=j.straggle,
                age_seconds=max(now - j.received, 0.0),
                complete=j.complete,
                overlapped_seconds=j.overlapped,
            )
            for j in kept
        )

    def _close_one(self, key: _Key, now: float, expected: int) -> None:
        # The minimum over few ranks is mostly waiting, so at least half of them must have reported.
        enough = 2 * len(self._pending[key].seconds) >= expected
        self._finish(key, now if enough else None)

    def _finish(self, key: _Key, received: float | None, *, complete: bool = False) -> None:
        pending = self._pending.pop(key)
        self._done[key] = None
        if len(self._done) > 2 * PENDING:
            self._done.popitem(last=False)
        if received is None:
            return
        transfer = min(pending.seconds.values())
        straggle = statistics.median(pending.seconds.values()) - transfer
        kind = self._joined.setdefault(pending.kind, deque(maxlen=PER_KIND))
        overlapped = pending.overlapped
        kind.append(
            _Joined(key[0], pending.kind, transfer, straggle, received, complete, overlapped)
        )
        self._joined.move_to_end(pending.kind)
        if len(self._joined) > KINDS:
            self._joined.popitem(last=False)
        step, bucket, number = key
        if bucket >= 0 and complete:
            longest = max(pending.seconds.values())
            for rank, seconds in pending.seconds.items():
                count, late = self._late.get(rank, (0, 0.0))
                count = min(count + 1, LATE_MEMORY)
                self._late[rank] = (count, late + (longest - seconds - late) / count)
        if bucket >= 0:  # no probe
            place = (bucket, number)
            self._waits.setdefault(place, deque(maxlen=PER_PLACE)).append((step, straggle))
            self._waits.move_to_end(place)
            if len(self._waits) > PLACES:
                self._waits.popitem(last=False)

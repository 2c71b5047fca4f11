"""Times of collectives of which several are under way at once, as DDP issues them.

A backend takes collectives in order and works on a few of them at a time, so the time from handing
one in to its end holds waiting for others. Three parts are told apart: waiting for its turn, which
is nobody's; being under way beside the one before, in which its latency may pass unseen while the
other's bytes have the wire; and the rest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

AT_ONCE = {"gloo": 2}
"""Collectives of one group that a backend works on at a time: gloo has two threads a device. On
others, such as NCCL, they follow one another in the order of a stream."""


class Busy(NamedTuple):
    """What one collective took, seconds.

    Attributes:
        seconds: From its turn or the end of all before it, whichever was later, to its own end.
        overlapped: From its turn to the end of all before it.
    """

    seconds: float
    overlapped: float


class NativeTimer:
    """Turns stamps of collectives of one group into what each of them took.

    Collectives are handed in by one thread and may end in others, in any order.

    Args:
        at_once: Collectives that the backend works on at a time.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lock = threading.Lock()
        self._open: OrderedDict[int, float] = OrderedDict()
        self._handed = 0
        self._ended = 0
        self._recent: OrderedDict[int, float] = OrderedDict()
        """When the newest ``at_once`` endings were, by how many had ended."""
        self._ends: OrderedDict[int, float] = OrderedDict()
        """Number of a collective to its end, the newest few."""

    def hand_in(self, now: float) -> int:
        """Note that a collective is handed in; return its number."""
        with self._lock:
            self._handed += 1
            self._open[self._handed] = now
            return self._handed

    def end(self, number: int, now: float) -> Busy:
        """Note that a collective ended."""
        with self._lock:
            turn = self._open.pop(number)
            overtook = next(iter(self._open), number) < number
            # Its turn came when only at_once - 1 of those before it were left.
            turn = max(turn, self._recent.get(number - self._at_once, 0.0))
            before = max((end for n, end in self._ends.items() if n < number), default=0.0)
            self._ended += 1
            _remember(self._recent, self._ended, now)
            _remember(self._ends, number, now)
        if overtook:  # what it took by itself cannot be told
            return Busy(0.0, max(now - turn, 0.0))
        alone = min(max(turn, before), now)
        return Busy(now - alone, max(alone - turn, 0.0))


def _remember(of: OrderedDict[int, float], number: int, now: float) -> None:
    of[number] = now
    if len(of) > 16:
        of.popitem(last=False)

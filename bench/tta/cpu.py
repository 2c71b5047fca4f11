"""Whether the machine was ours: what other programs took of the processors during a training."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A moment.

    Attributes:
        at: Monotonic seconds.
        busy: Seconds that all processors have worked since the machine started.
        own: Seconds that some processes have worked.
    """

    at: float
    busy: float
    own: float

    @staticmethod
    def take(pids: Iterable[int], root: Path = Path("/proc")) -> Snapshot:
        """Return the present moment.

        Args:
            pids: Of the processes that are ours.
            root: Where the kernel tells.
        """
        # user, nice, system, idle, iowait, irq, softirq, steal
        fields = [int(v) for v in (root / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(fields) - fields[3] - fields[4]
        return Snapshot(
            time.monotonic(), busy / _TICKS, sum(_ticks(root, pid) for pid in pids) / _TICKS
        )

    def others(self, earlier: Snapshot, cpus: int | None = None) -> float:
        """Return the share of all processors that others took since then, [0, 1].

        The kernel's work on packets, which it does in nobody's name, and netlab's delay process
        are among the others.
        """
        seconds = (self.at - earlier.at) * (cpus or os.cpu_count() or 1)
        return max(0.0, (self.busy - earlier.busy) - (self.own - earlier.own)) / max(seconds, 1e-9)


def _ticks(root: Path, pid: int) -> int:
    """Return user and system time of a process with all its threads, 0 if it is gone."""
    try:
        text = (root / str(pid) / "stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return int(fields[11]) + int(fields[12])

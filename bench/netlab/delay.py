"""The process that gives the hosts their latency; a kernel with netem would do without it.

Whatever arrives at a host waits in the kernel's queue until it is due, in order. The process sees
numbers, no payload. It wakes a little before a packet is due, by as much as it was late before, so
that the delay is right in the median whatever the machine's timers are worth.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from bench.netlab import names
from bench.netlab.helper import go_first
from bench.netlab.helper import main as helper_main
from bench.netlab.nfqueue import PacketQueue

PRIORITY = 20
"""Above the background traffic, and above what computes on the hosts."""

LEAD_STEP, MOST_LEAD = 2e-6, 5e-4
"""By how much a late or early wake-up moves the next, and the most by which one is early, s."""

NEVER = float("inf")


class Lead:
    """How much earlier to wake: the median of how late wake-ups were, followed by small steps."""

    def __init__(self) -> None:
        self.seconds = 5e-5

    def learn(self, late: float) -> None:
        """Move by one step against what was seen, s; how much it was does not matter."""
        step = LEAD_STEP if late > 0 else -LEAD_STEP
        self.seconds = min(MOST_LEAD, max(0.0, self.seconds + step))


class Line:
    """What waits before one host."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.packets = 0
        self.late_most = 0.0
        self.waiting: deque[tuple[float, int]] = deque()  # when each is due, and its number

    def arrive(self, number: int, arrival: float) -> None:
        """Take a packet; it waits for those before it, even if the delay has become shorter."""
        self.waiting.append((arrival + self.delay, number))
        self.packets += 1

    def release(self, until: float) -> int:
        """Take out all that is due until then, the first of them being so, and return the last."""
        waiting, number = self.waiting, 0
        while waiting and waiting[0][0] <= until:
            number = waiting.popleft()[1]
        return number


class Delay:
    """The work of the process: a queue and a line for each host."""

    def __init__(self, name: str, hosts: int, mtu: int) -> None:
        queues = [PacketQueue(names.host(name, i)) for i in range(hosts)]
        self._lines = [Line() for _ in range(hosts)]
        self._pairs = list(zip(queues, self._lines, strict=True))
        self._by_descriptor = {queue.fileno(): (queue, line) for queue, line in self._pairs}
        self._descriptors = list(self._by_descriptor)
        self._lead = Lead()
        self._wake_at: float | None = None
        self._real_time = go_first(PRIORITY)

    def sockets(self) -> Sequence[int]:
        """Return the queues' descriptors."""
        return self._descriptors

    def wake_at(self) -> float | None:
        """Return when the next packet is due."""
        return self._wake_at

    def step(self, ready: Sequence[int]) -> None:
        """Take what arrived, let go what is due."""
        for descriptor in ready:
            queue, line = self._by_descriptor[descriptor]
            for number, arrival in queue.receive():
                line.arrive(number, arrival)
        lead, first = self._lead.seconds, NEVER
        until = time.monotonic() + lead
        for queue, line in self._pairs:
            waiting = line.waiting
            if waiting and waiting[0][0] <= until:
                due = waiting[0][0]
                queue.accept(line.release(until))  # the kernel delivers within this call
                if line.delay:
                    late = time.monotonic() - due
                    self._lead.learn(late)
                    line.late_most = max(line.late_most, late)
            if waiting and waiting[0][0] < first:
                first = waiting[0][0]
        self._wake_at = None if first == NEVER else first - lead

    def request(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Set delays (``seconds``: one for each host), and tell how it goes."""
        if "seconds" in fields:
            if len(fields["seconds"]) != len(self._lines):
                raise ValueError(f"{len(self._lines)} delays, got {len(fields['seconds'])}")
            for line, seconds in zip(self._lines, fields["seconds"], strict=True):
                line.delay = float(seconds)
        return {
            "real_time": self._real_time,
            "seconds": [line.delay for line in self._lines],
            "packets": [line.packets for line in self._lines],
            "held": [len(line.waiting) for line in self._lines],
            "lead_us": round(1e6 * self._lead.seconds),
            "late_most_us": [round(1e6 * line.late_most) for line in self._lines],
        }


def main() -> int:
    """Start the process; see ``helper``."""
    return helper_main("delay", Delay, sys.argv[1:])

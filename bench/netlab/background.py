"""The process that makes background traffic: datagrams from host to host at a fixed rate.

They take their share of the sender's and the receiver's link as other people's traffic would, and
yield to nobody. The receiving host drops them before anything else sees them.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.netlab import names
from bench.netlab.helper import go_first
from bench.netlab.helper import main as helper_main
from bench.netlab.system import socket_in

PRIORITY = 10
"""Other people's traffic does not wait for our processors."""

PORT = 9  # "discard"
UDP_SEGMENT = 103
"""Option of UDP sockets: the kernel cuts what is sent into datagrams of that size."""

UDP_HEADERS = 28
ETHERNET_HEADER = 14
_TICK_SECONDS = 2e-3
_MOST_BEHIND = 0.02
"""What a stalled process makes good later, s of its rate; the rest is lost, as on a wire."""

_MOST_BYTES = 63_000
_SO_SNDBUFFORCE, _SEND_BYTES = 32, 4 << 20


class Flow:
    """Traffic from one host to another."""

    def __init__(self, wire: socket.socket, mtu: int) -> None:
        """Begin silent.

        Args:
            wire: Connected to the target.
            mtu: Largest IP packet, bytes.
        """
        self.rate = 0.0
        self.frames = 0
        self.refused = 0
        self._wire = wire
        self._size = mtu - UDP_HEADERS
        self._frame = mtu + ETHERNET_HEADER
        self._most = min(60, _MOST_BYTES // self._size)  # the kernel cuts into 64 at most
        self._next = 0.0
        self._payload = memoryview(bytes(self._most * self._size))

    def set(self, bytes_per_second: float, now: float) -> None:
        """Change the rate from now on; 0 stops it."""
        self.rate, self._next = bytes_per_second, now

    def due(self) -> float | None:
        """Return when to send next, by the monotonic clock."""
        return self._next if self.rate else None

    def send(self, now: float) -> None:
        """Send what is due, and say when more will be."""
        if not self.rate or now < self._next:
            return
        each = self._frame / self.rate
        self._next = max(self._next, now - _MOST_BEHIND)
        while self._next <= now:
            count = min(self._most, max(1, round(_TICK_SECONDS / each)))
            try:
                self._wire.send(self._payload[: count * self._size])
                self.frames += count
            except OSError:
                self.refused += count  # the link's queue is full
            self._next += count * each


class Background:
    """The work of the process: every flow that was asked for."""

    def __init__(self, name: str, hosts: int, mtu: int) -> None:
        self._name, self._mtu = name, mtu
        self._flows: dict[tuple[int, int], Flow] = {}
        go_first(PRIORITY)

    def _connect(self, source: int, target: int) -> socket.socket:
        wire = socket_in(names.host(self._name, source), socket.AF_INET, socket.SOCK_DGRAM)
        wire.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, self._mtu - UDP_HEADERS)
        wire.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BYTES)
        wire.setblocking(False)
        wire.connect((names.address(target), PORT))
        return wire

    def sockets(self) -> Sequence[int]:
        """Nothing comes back."""
        return []

    def wake_at(self) -> float | None:
        """Return when the next datagrams are due."""
        return min(
            (d for flow in self._flows.values() if (d := flow.due()) is not None), default=None
        )

    def step(self, ready: Sequence[int]) -> None:
        """Send what is due."""
        now = time.monotonic()
        for flow in self._flows.values():
            flow.send(now)

    def request(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Set the rate of a flow (``source``, ``target``, ``bytes_per_second``)."""
        if "source" in fields:
            pair = (int(fields["source"]), int(fields["target"]))
            if pair not in self._flows:
                self._flows[pair] = Flow(self._connect(*pair), self._mtu)
            self._flows[pair].set(float(fields["bytes_per_second"]), time.monotonic())
        return {
            f"{source}-{target}": {
                "bytes_per_second": flow.rate,
                "sent_bytes": flow.frames * (self._mtu + ETHERNET_HEADER),
                "refused_bytes": flow.refused * (self._mtu + ETHERNET_HEADER),
            }
            for (source, target), flow in self._flows.items()
        }


def main() -> int:
    """Start the process; see ``helper``."""
    return helper_main("background", Background, sys.argv[1:])

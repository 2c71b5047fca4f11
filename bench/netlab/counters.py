"""Bytes on the wire, host by host.

They are read from the shapers, not from the devices: a device counts a packet of 64 KiB with one
header, the shaper with the headers of the 45 frames that it stands for, and that is what the rate
is about.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from bench.netlab import names
from bench.netlab.background import ETHERNET_HEADER, UDP_HEADERS
from bench.netlab.build import iptables
from bench.netlab.errors import CommandError
from bench.netlab.state import State
from bench.netlab.system import command


@dataclass(frozen=True, slots=True)
class Counters:
    """What a host's link carried since the lab came up, background traffic and ARP included.

    Attributes:
        sent_bytes: Ethernet frames that left the host.
        sent_frames: Their number.
        received_bytes: Ethernet frames that the bridge sent to the host.
        received_frames: Their number.
        dropped_packets: Packets that found a queue full, in either direction; a packet may stand
            for many frames.
        waiting_bytes: In the queues now, in both directions.
    """

    sent_bytes: int
    sent_frames: int
    received_bytes: int
    received_frames: int
    dropped_packets: int
    waiting_bytes: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            self.sent_bytes - earlier.sent_bytes,
            self.sent_frames - earlier.sent_frames,
            self.received_bytes - earlier.received_bytes,
            self.received_frames - earlier.received_frames,
            self.dropped_packets - earlier.dropped_packets,
            self.waiting_bytes,
        )


def read(state: State) -> list[Counters]:
    """Return the counters of all hosts.

    Raises:
        CommandError: ``tc`` failed or printed something else.
    """
    hub = _shapers(names.hub(state.name))
    found = []
    for i in range(state.hosts):
        up = _shapers(names.host(state.name, i))[names.DEVICE]
        down = hub[names.port(i)]
        found.append(
            Counters(
                up["bytes"],
                up["packets"],
                down["bytes"],
                down["packets"],
                up["drops"] + down["drops"],
                up["backlog"] + down["backlog"],
            )
        )
    return found


def _shapers(namespace: str) -> dict[str, dict[str, Any]]:
    argv = ["tc", "-n", namespace, "-s", "-j", "qdisc", "show"]
    text = command(argv)
    try:
        return {row["dev"]: row for row in json.loads(text) if row["kind"] == "htb"}
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{' '.join(argv)!r} must print JSON with dev and kind (iproute2 5 or newer), "
            f"got {text[:200]!r}: {error!r}"
        ) from error


def carried(state: State, source: int, target: int) -> int:
    """Return how many bytes of background traffic from one host reached another, as frames.

    Raises:
        CommandError: ``iptables`` failed.
    """
    rules = iptables(names.host(state.name, target), "-t raw -v -S PREROUTING")
    return frames_carried(rules, names.address(source), state.mtu) * (state.mtu + ETHERNET_HEADER)


def frames_carried(rules: str, address: str, mtu: int) -> int:
    """Return the number of frames that a drop rule counted.

    It counts a large packet once, with one header; all frames but the last are full, and so is
    that one, by how ``background`` sends.

    Args:
        rules: What ``iptables -v -S`` printed.
        address: The sender.
        mtu: Largest IP packet, bytes.
    """
    hit = re.search(rf"-s {re.escape(address)}/32 .*-c (\d+) (\d+) -j DROP", rules)
    if hit is None:
        return 0
    packets, ip_bytes = int(hit[1]), int(hit[2])
    return (ip_bytes - packets * UDP_HEADERS) // (mtu - UDP_HEADERS)

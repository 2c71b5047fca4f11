"""Whether a lab is what was asked for: rate within 5 %, round trip within 10 %, or it says so."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.netlab import probes
from bench.netlab.background import ETHERNET_HEADER
from bench.netlab.control import Helper
from bench.netlab.errors import BadRequestError
from bench.netlab.lab import Lab
from bench.netlab.link import Link, between

RATE_TOLERANCE = 0.05
RTT_TOLERANCE = 0.10
IDLE_RTT_MS = 0.5
"""Where no round trip was asked for, what the machine itself may need."""

_TCP_HEADERS = 52  # IP, TCP, time stamps
_SETTLE_SECONDS = 0.15  # for what a measurement leaves in queues


def wire_share(mtu: int) -> float:
    """Return TCP's payload over the frames that carry it."""
    return (mtu - _TCP_HEADERS) / (mtu + ETHERNET_HEADER)


def warm_up(rtt_ms: float) -> float:
    """Return how long TCP needs before it fills a link that it has to itself, s."""
    return 0.4 + 20 * rtt_ms / 1e3


@dataclass(frozen=True, slots=True)
class Measured:
    """One pair of hosts, asked and measured.

    Attributes:
        source: Who sent.
        target: Who received.
        asked_mbit: The lesser of their rates, Mbit/s.
        measured_mbit: Frames that carried one TCP connection, Mbit/s.
        asked_rtt_ms: The mean of their round trips, ms.
        measured_rtt_ms: Median round trip of small datagrams on the idle link, ms; NaN if all
            were lost.
        rtt_p90_ms: What nine of ten stay below.
        delay_cpu: What the delay process used during the transfer, of one core; 0 without one.
    """

    source: int
    target: int
    asked_mbit: float
    measured_mbit: float
    asked_rtt_ms: float
    measured_rtt_ms: float
    rtt_p90_ms: float
    delay_cpu: float

    @property
    def rate_error(self) -> float:
        """Measured over asked, less 1."""
        return self.measured_mbit / self.asked_mbit - 1

    @property
    def rtt_error(self) -> float:
        """Measured over asked, less 1; 0 if none was asked for."""
        return self.measured_rtt_ms / self.asked_rtt_ms - 1 if self.asked_rtt_ms else 0.0

    def problems(self) -> list[str]:
        """Return what is not as asked, with both numbers; empty if all is."""
        pair, found = f"{self.source} -> {self.target}", []
        if not abs(self.rate_error) <= RATE_TOLERANCE:
            found.append(
                f"{pair}: asked for {self.asked_mbit:g} Mbit/s, measured {self.measured_mbit:.1f} "
                f"({self.rate_error:+.1%}, allowed {RATE_TOLERANCE:.0%})"
            )
        if not self.asked_rtt_ms:
            if not self.measured_rtt_ms <= IDLE_RTT_MS:
                found.append(
                    f"{pair}: asked for no delay, measured a round trip of "
                    f"{self.measured_rtt_ms:.3f} ms (allowed {IDLE_RTT_MS:g})"
                )
        elif not abs(self.rtt_error) <= RTT_TOLERANCE:
            found.append(
                f"{pair}: asked for a round trip of {self.asked_rtt_ms:g} ms, measured "
                f"{self.measured_rtt_ms:.3f} ({self.rtt_error:+.1%}, allowed {RTT_TOLERANCE:.0%})"
            )
        return found


def check(
    lab: Lab, pairs: Sequence[tuple[int, int]] | None = None, seconds: float = 1.0, count: int = 40
) -> list[Measured]:
    """Measure an idle lab, one pair of hosts after another.

    Args:
        lab: It must be up, without background traffic, and otherwise unused.
        pairs: Sender and receiver; each host with the next by default, so that every link is
            measured in both directions.
        seconds: How long each throughput is measured.
        count: How many round trips are measured for each pair.

    Raises:
        BadRequestError: There is background traffic.
        NetlabError: Nothing gets through.
    """
    state = lab.state()
    if state.flows:
        raise BadRequestError(
            f"a check needs the links for itself, but there is background traffic {state.flows}: "
            "set it to 0 first"
        )
    chosen = pairs or [(i, (i + 1) % state.hosts) for i in range(state.hosts)]
    return [_pair(lab, state.links, a, b, seconds, count) for a, b in chosen]


def _pair(
    lab: Lab, links: Sequence[Link], source: int, target: int, seconds: float, count: int
) -> Measured:
    asked = between(links[source], links[target])
    where = (lab.namespace(source), lab.namespace(target), lab.address(target))
    trips = probes.round_trips(*where, count, lost_after=1.0 + 2 * asked.rtt_ms / 1e3)
    delay = Helper(lab.name, "delay").process()
    before, begun = delay.cpu_seconds() if delay else 0.0, time.monotonic()
    payload = probes.throughput(*where, seconds, warm_up(asked.rtt_ms))
    spent = (delay.cpu_seconds() - before) / (time.monotonic() - begun) if delay else 0.0
    time.sleep(_SETTLE_SECONDS)
    return Measured(
        source,
        target,
        asked.rate_mbit,
        8e-6 * payload / wire_share(lab.state().mtu),
        asked.rtt_ms,
        1e3 * probes.median(trips),
        1e3 * sorted(trips)[int(0.9 * len(trips))] if trips else math.nan,
        spent,
    )


def verdict(measured: Sequence[Measured]) -> list[str]:
    """Return the problems of all pairs, and the machine's load if there are any."""
    problems = [problem for one in measured for problem in one.problems()]
    if problems:
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        problems.append(
            f"load is {load:.1f} on {cores} cores; if that is other work, check again without it, "
            "otherwise ask for less"
        )
    return problems

"""What the hosts have between them: constant links, schedules, other people's traffic.

Published schedules are scaled to hosts that share two cores: a step takes tens of milliseconds here
and the gradient of a task is 2 to 10 MB, so that links as fast as the published ones would never be
felt. The scale is ``RATE_SCALE``, ``LATENCY_SCALE`` and ``EPOCH_SECONDS`` for all phases alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.netlab import Change, Link, Trace

RATE_SCALE = 1 / 25
LATENCY_SCALE = 1 / 5
EPOCH_SECONDS = {"c1": 20.0 / 12, "c2": 2.0}
"""Published bandwidths and latencies are multiplied by the first two; an epoch lasts so long."""

SEEDS = 3
"""A seed begins a schedule a third of the phases later than the one before."""

SLOW_SECONDS = 0.06
"""What the slow host needs more for a step, about a step's computing on the others."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A time during which nothing changes.

    Attributes:
        seconds: How long; infinite if for ever.
        link: Of every host.
        background_mbit: Other traffic from every even host to the next, Mbit/s.
    """

    seconds: float
    link: Link
    background_mbit: float = 0.0

    @property
    def state(self) -> tuple[Link, float]:
        """Return what makes it different from other phases but for its length."""
        return (self.link, self.background_mbit)


@dataclass(frozen=True, slots=True)
class Network:
    """Phases that repeat, and what is special about the last host.

    Attributes:
        name: Key in ``NETWORKS``.
        what: One line for people.
        phases: In order; of a constant network there is one.
        last_link: Link of the last host if it is another one.
        last_seconds: How much longer the last host computes in each step, s.
    """

    name: str
    what: str
    phases: tuple[Phase, ...]
    last_link: Link | None = None
    last_seconds: float = 0.0

    @property
    def changing(self) -> bool:
        """Return whether it changes over time."""
        return len(self.phases) > 1

    @property
    def period(self) -> float:
        """Return after how many seconds it repeats."""
        return sum(phase.seconds for phase in self.phases)

    def turned(self, seed: int) -> Network:
        """Return it as a seed meets it: beginning with a later phase."""
        first = seed * len(self.phases) // SEEDS % len(self.phases)
        return replace(self, phases=(*self.phases[first:], *self.phases[:first]))

    def links(self, hosts: int) -> list[Link]:
        """Return the link that every host begins with."""
        links = [self.phases[0].link] * hosts
        if self.last_link is not None:
            links[-1] = self.last_link
        return links

    def trace(self, hosts: int) -> Trace | None:
        """Return the changes of one period; None if there is nothing to do."""
        busy = any(phase.background_mbit for phase in self.phases)
        if not (self.changing or busy):
            return None
        changes: list[Change] = []
        at = 0.0
        for phase in self.phases:
            changes += change_to(phase, at, hosts, busy)
            at += phase.seconds
        return Trace(tuple(changes))

    def at(self, seconds: float) -> Phase:
        """Return the phase of a moment since the beginning."""
        if not self.changing:
            return self.phases[0]
        left = seconds % self.period
        for phase in self.phases:
            if left < phase.seconds:
                return phase
            left -= phase.seconds
        return self.phases[-1]

    def beginnings(self, until: float) -> list[tuple[float, Phase]]:
        """Return when every phase before ``until`` begins, repetitions included."""
        if not self.changing:
            return [(0.0, self.phases[0])]
        found, at = [], 0.0
        while at < until:
            for phase in self.phases:
                found.append((at, phase))
                at += phase.seconds
        return [(begun, phase) for begun, phase in found if begun < until]


def change_to(phase: Phase, at: float, hosts: int, busy: bool) -> list[Change]:
    """Return what puts a phase in force.

    Args:
        phase: Of a network whose hosts are alike.
        at: Seconds since the beginning.
        hosts: Their number.
        busy: Whether there is other traffic in any phase, so that it must be set in this one.
    """
    changes = [Change(at, None, None, phase.link.rate_mbit, phase.link.rtt_ms)]
    if busy:
        flows = [(i, i + 1) for i in range(0, hosts - 1, 2)]
        changes += [Change(at, None, flow, phase.background_mbit, None) for flow in flows]
    return changes


def _constant(name: str, rate_mbit: float, rtt_ms: float, **more: float) -> Network:
    link = Link(rate_mbit=rate_mbit, rtt_ms=rtt_ms)
    what = f"{rate_mbit:g} Mbit/s, round trip {rtt_ms:g} ms"
    return Network(name, what, (Phase(math.inf, link),), **more)  # type: ignore[arg-type]


def _published(name: str, epochs: Iterable[tuple[float, float, float]]) -> Network:
    """Return a schedule of (epochs, one-way latency in ms, Gbit/s), scaled."""
    phases = tuple(
        Phase(
            number * EPOCH_SECONDS[name],
            Link(
                rate_mbit=round(1e3 * gbps * RATE_SCALE, 3),
                rtt_ms=round(2 * alpha_ms * LATENCY_SCALE, 3),
            ),
        )
        for number, alpha_ms, gbps in epochs
    )
    what = (
        f"schedule {name.upper()} of Tyagi and Swany with bandwidths x {RATE_SCALE:g}, latencies"
        f" x {LATENCY_SCALE:g}, {EPOCH_SECONDS[name]:.3g} s an epoch, repeating"
    )
    return Network(name, what, phases)


def _bursty(seed: int = 0) -> Network:
    """Return a link of 500 Mbit/s that others fill now and then, each time for another while."""
    draw = random.Random(seed)
    link = Link(rate_mbit=500, rtt_ms=1)
    phases = []
    for _ in range(4):
        phases.append(Phase(round(draw.uniform(8, 20), 1), link))
        phases.append(Phase(round(draw.uniform(8, 20), 1), link, 450.0))
    what = "500 Mbit/s, round trip 1 ms, of which other traffic takes 450 for 8 to 20 s at a time"
    return Network("bursty", what, tuple(phases))


# The end of the paper's schedules is open; here the last phase is as long as the one before.
_C1: Sequence[tuple[float, float, float]] = ((12, 1, 25), (12, 1, 1), (12, 50, 1), (12, 50, 25))
_C2: Sequence[tuple[float, float, float]] = (
    *((4, 1, 25), (4, 2, 20), (4, 4, 15), (4, 8, 10), (4, 16, 5), (8, 32, 1)),
    *((4, 16, 5), (4, 8, 10), (4, 4, 15), (4, 2, 20), (4, 1, 25)),
)

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        _constant("1000mbit-1ms", 1000, 1),
        _constant("500mbit-1ms", 500, 1),
        _constant("100mbit-5ms", 100, 5),
        _constant("50mbit-20ms", 50, 20),
        _constant("fast", 10_000, 0),
        _published("c1", _C1),
        _published("c2", _C2),
        _bursty(),
        Network(
            "slow-host",
            f"500 Mbit/s, round trip 1 ms; the last host computes {SLOW_SECONDS:g} s longer a step",
            (Phase(math.inf, Link(rate_mbit=500, rtt_ms=1)),),
            last_seconds=SLOW_SECONDS,
        ),
        Network(
            "slow-link",
            "500 Mbit/s, round trip 1 ms; the last host has 100 Mbit/s",
            (Phase(math.inf, Link(rate_mbit=500, rtt_ms=1)),),
            last_link=Link(rate_mbit=100, rtt_ms=1),
        ),
    )
}
"""By name. The first four and ``fast`` are constant."""

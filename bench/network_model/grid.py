"""What is timed: collectives, sizes, networks; and what is kept of it."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.netlab import Lab, Link
from bench.network_model.ranks import Ranks, Run, Timed
from gradpilot.protos.messages import COLLECTIVES

LAB = f"netmodel{os.getpid()}"

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 21)
"""Bytes that the collective is about: of an all-gather, all parts together."""

RANKS = (4, 8)

NETWORKS = (
    Link(rate_mbit=50, rtt_ms=10),
    Link(rate_mbit=100, rtt_ms=2),
    Link(rate_mbit=100, rtt_ms=20),
    Link(rate_mbit=200, rtt_ms=1),
    Link(rate_mbit=200, rtt_ms=5),
    Link(rate_mbit=500, rtt_ms=2),
)

MOST_TOGETHER_MBIT = 2000.0
"""What all hosts send at once, at most: two cores that carry more measure themselves."""

FRAME_SHARE = 1448 / 1514
"""What TCP carries of a rate at an MTU of 1500."""

WARM_UP_BYTES = 1 << 20
FACTOR, EXTRA_SECONDS = 20.0, 60.0
"""An order may take so many times what its bytes need, and so much longer."""

START_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Grid:
    """How much is measured.

    Attributes:
        ranks: Numbers of ranks.
        networks: Links, the same for all hosts.
        sizes: Bytes that a collective is about.
        kinds: Of ``messages.COLLECTIVES``.
        repeats: How often each is timed, after a pass that warms up.
        seed: Of the order in which they are.
    """

    ranks: tuple[int, ...] = RANKS
    networks: tuple[Link, ...] = NETWORKS
    sizes: tuple[int, ...] = SIZES
    kinds: tuple[str, ...] = COLLECTIVES
    repeats: int = 5
    seed: int = 0

    def carried(self, ranks: int) -> list[Link]:
        """Return the networks on which this machine can carry the traffic of so many hosts."""
        return [n for n in self.networks if ranks * n.rate_mbit <= MOST_TOGETHER_MBIT]


QUICK = Grid(ranks=(4,), networks=NETWORKS[3:4], sizes=SIZES[:3], repeats=3)


@dataclass(frozen=True, slots=True)
class Cell:
    """One collective of one size on one network, timed several times.

    Attributes:
        kind: One of ``messages.COLLECTIVES``.
        ranks: Ranks N.
        link: Of every host.
        size: Bytes that it is about, see ``SIZES``.
        seconds: Of every repetition, from the first rank's beginning to the last one's end.
        sent: Bytes that each rank sent, headers included; the median repetition.
    """

    kind: str
    ranks: int
    link: Link
    size: int
    seconds: tuple[float, ...]
    sent: tuple[int, ...]

    @property
    def handed_in(self) -> int:
        """Return the bytes that one rank hands in."""
        return handed_in(self.kind, self.size, self.ranks)

    @property
    def median(self) -> float:
        """Return the median time, seconds."""
        return statistics.median(self.seconds)


def handed_in(kind: str, size: int, ranks: int) -> int:
    """Return the bytes that one rank hands in: of an all-gather its part, else everything."""
    return size // ranks if kind == "all_gather" else size


def bytes_per_second(link: Link) -> float:
    """Return what TCP carries on a link."""
    return 1e6 / 8 * link.rate_mbit * FRAME_SHARE


def measure(grid: Grid, say: Callable[[str], None] = lambda text: None) -> list[Cell]:
    """Time every collective of a grid on emulated hosts.

    Args:
        grid: What is timed.
        say: Is told of progress.

    Raises:
        NetlabError: There can be no such hosts.
        RanksFailedError: A rank failed.
    """
    found: list[Cell] = []
    for ranks in grid.ranks:
        runs = [run for _, run in _runs(grid, ranks)]
        networks = grid.carried(ranks)
        limit = START_SECONDS + sum(2 * _limit(runs, link) for link in networks)
        with (
            Lab(LAB, hosts=ranks, link=networks[0]) as lab,
            Ranks(ranks, lab, limit) as processes,
        ):
            for link in networks:
                lab.set(rate_mbit=link.rate_mbit, rtt_ms=link.rtt_ms)
                found += cells(processes, ranks, link, grid)
                say(f"{ranks} hosts, {link.rate_mbit:g} Mbit/s {link.rtt_ms:g} ms: done")
    return found


def cells(processes: Ranks, ranks: int, link: Link, grid: Grid) -> list[Cell]:
    """Time the collectives of a grid on ranks that are there, under the link that is in force."""
    pause = link.rtt_ms / 1e3
    warm_up = [Run(kind, 0, min(WARM_UP_BYTES, max(grid.sizes))) for kind in grid.kinds]
    processes.time(warm_up, START_SECONDS + _limit(warm_up, link), pause)
    runs = _runs(grid, ranks)
    runs_only = [run for _, run in runs]
    timed = processes.time(runs_only, _limit(runs_only, link), pause)
    by_case: dict[tuple[str, int], list[Timed]] = {}
    for (size, run), one in zip(runs, timed, strict=True):
        by_case.setdefault((run.kind, size), []).append(one)
    return [
        Cell(kind, ranks, link, size, tuple(one.seconds for one in ones), _middle(ones))
        for (kind, size), ones in sorted(by_case.items())
    ]


def _runs(grid: Grid, ranks: int) -> list[tuple[int, Run]]:
    """Return all runs with the size that each is about; every pass in an order of its own."""
    draw = random.Random(grid.seed)
    runs = []
    for _ in range(grid.repeats):
        once = [
            (size, Run(kind, 0, handed_in(kind, size, ranks)))
            for kind in grid.kinds
            for size in grid.sizes
        ]
        draw.shuffle(once)
        runs += once
    return runs


def _limit(runs: Sequence[Run], link: Link) -> float:
    """Return how long runs may take, seconds."""
    pushed = sum(run.bytes for run in runs) / bytes_per_second(link)
    return EXTRA_SECONDS + FACTOR * (pushed + len(runs) * link.rtt_ms / 1e3)


def _middle(ones: Sequence[Timed]) -> tuple[int, ...]:
    return sorted(ones, key=lambda one: sum(one.sent))[len(ones) // 2].sent

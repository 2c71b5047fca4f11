"""The time of a ring that skips, on emulated hosts, against its number of steps.

A block is one all-reduce for each number of skipped steps, in an order of its own. In every block
the time of the ring that skips nothing is divided by its 2 (N - 1) steps, which foretells the time
of all others: ``2 (N - 1) - S`` steps. The row that skips nothing cannot be judged that way; all
rows are also compared with the link as asked for.

Letters: N ranks, S skipped steps.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import results_file
from bench.netlab import Lab, Link
from bench.network_model.grid import bytes_per_second
from bench.network_model.ranks import Ranks, Run
from gradpilot.policies.cost import Affine, coefficients

LAB = f"skip{os.getpid()}"
LIMIT = 0.03

LINK = Link(rate_mbit=100, rtt_ms=2)
"""Slow enough that two cores carry the traffic of all hosts, and a step of the least payload takes
40 times the latency."""

START_SECONDS = 90.0
FACTOR = 10.0
"""An order may take so many times what its bytes need."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How much is timed.

    Attributes:
        ranks: Numbers of ranks.
        megabytes: Payloads, 10^6 bytes.
        blocks: Blocks of each, after one that does not count.
        link: Of every host.
        seed: Of the order within blocks.
    """

    ranks: tuple[int, ...] = (4, 8)
    megabytes: tuple[int, ...] = (4, 16)
    blocks: int = 9
    link: Link = LINK
    seed: int = 0


QUICK = Setup(ranks=(4,), megabytes=(4,), blocks=3)

Blocks = Sequence[Mapping[int, float]]
"""Seconds by number of skipped steps, one mapping a block."""


def measure(setup: Setup, say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Time everything on emulated hosts and return a row for every payload and number of steps.

    Raises:
        NetlabError: There can be no such hosts.
        RanksFailedError: A rank failed.
    """
    found = []
    for ranks in setup.ranks:
        limit = START_SECONDS + sum(_seconds(setup, ranks, mb) for mb in setup.megabytes)
        with (
            Lab(LAB, hosts=ranks, link=setup.link) as lab,
            Ranks(ranks, lab, limit) as processes,
        ):
            for megabytes in setup.megabytes:
                found += rows(blocks(processes, ranks, megabytes, setup), ranks, megabytes, setup)
                say(f"{ranks} hosts, {megabytes} MB: done")
    return found


def blocks(processes: Ranks, ranks: int, megabytes: int, setup: Setup) -> Blocks:
    """Time the blocks of one payload."""
    draw = random.Random(setup.seed)
    skips = list(range(ranks))
    order = []
    for _ in range(setup.blocks + 1):
        draw.shuffle(skips)
        order += skips
    runs = [Run("ring", skip, megabytes * 1_000_000) for skip in order]
    limit = START_SECONDS + _seconds(setup, ranks, megabytes)
    timed = processes.time(runs, limit, setup.link.rtt_ms / 1e3)
    found = []
    for first in range(ranks, len(runs), ranks):  # from the second block on
        ours = zip(runs[first : first + ranks], timed[first : first + ranks], strict=True)
        found.append({run.skip: one.seconds for run, one in ours})
    return found


def rows(timed: Blocks, ranks: int, megabytes: int, setup: Setup) -> list[dict[str, Any]]:
    """Return a row for every number of skipped steps."""
    steps = 2 * (ranks - 1)
    found = []
    for skip in sorted(timed[0]):
        seconds = [block[skip] for block in timed]
        share = (steps - skip) / steps
        ratios = sorted(block[skip] / (share * block[0]) for block in timed)
        linked = link_seconds(ranks, skip, megabytes, setup.link)
        row = {
            "case": "time",
            "ranks": ranks,
            "megabytes": megabytes,
            "rate_mbit": setup.link.rate_mbit,
            "rtt_ms": setup.link.rtt_ms,
            "skip": skip,
            "steps": steps - skip,
            "blocks": len(timed),
            "measured_ms": round(1e3 * statistics.median(seconds), 3),
            "least_ms": round(1e3 * min(seconds), 3),
            "most_ms": round(1e3 * max(seconds), 3),
            "by_link_ms": round(1e3 * linked, 3),
            "over_link": round(statistics.median(seconds) / linked, 4),
            "speedup": round(statistics.median(block[0] / block[skip] for block in timed), 4),
            "most_speedup": round(1 / share, 4),
        }
        if skip:  # the first row foretells the others, not itself
            row["over_steps"] = round(statistics.median(ratios), 4)
            row["over_steps_least"] = round(ratios[0], 4)
            row["over_steps_most"] = round(ratios[-1], 4)
        found.append(row)
    return found


def link_seconds(ranks: int, skip: int, megabytes: float, link: Link) -> float:
    """Return the time that ``policies.cost`` foretells for the link as asked for."""
    cost = Affine(*coefficients("ring", ranks, skip, "gloo"))
    return cost.seconds(link.one_way_seconds, 1 / bytes_per_second(link), 1e6 * megabytes)


def verdicts(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return whether time follows the number of steps, and is never shorter than it can be."""
    claims = []
    for ranks, megabytes in dict.fromkeys((row["ranks"], row["megabytes"]) for row in found):
        ours = [
            row
            for row in found
            if (row["ranks"], row["megabytes"]) == (ranks, megabytes) and row["skip"]
        ]
        worst = max((row["over_steps"] - 1 for row in ours), key=abs)
        where = f"N = {ranks}, {megabytes} MB"
        claims.append(
            results_file.verdict(
                f"ring that skips, time over that of 2 (N - 1) - S steps, {where}:"
                " farthest median of all S, %",
                f"within {100 * LIMIT:g}",
                round(100 * worst, 2),
                abs(worst) <= LIMIT,
            )
        )
        beyond = max(row["speedup"] / row["most_speedup"] for row in ours)
        claims.append(
            results_file.verdict(
                f"speed-up over the bound 2 (N - 1) / (2 (N - 1) - S), {where}: greatest",
                f"<= {1 + LIMIT:g}",
                round(beyond, 4),
                beyond <= 1 + LIMIT,
            )
        )
    return claims


def _seconds(setup: Setup, ranks: int, megabytes: int) -> float:
    """Return how long the blocks of a payload may take."""
    one = link_seconds(ranks, 0, megabytes, setup.link)
    return FACTOR * one * ranks * (setup.blocks + 1)

"""The options of a catalog: heads, ratio grids, and the rounds that a ratio costs.

A *head* is a family with a collective and a number of skipped reduce steps; every head has a grid
of ratios, and heads times ratios are the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.base import Inputs
from gradpilot.policies.compute import FamilyKey
from gradpilot.policies.cost import carried_by, coefficients
from gradpilot.policies.skipping import SKIPPING, most_skipped
from gradpilot.protos.messages import REQUESTS, Family, Option

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

MAX_OPTIONS = 100_000

KINDS = ("all_reduce", "fixed", "all_gather", "broadcast", "reduce_scatter", "all_to_all")
"""Rounds by what carries them; ``fixed`` is an all-reduce that must not skip."""

COSTED = ("native", *SKIPPING, "allgather", "alltoall")
"""Values of ``Option.collective`` that ``cost`` has a form for."""


@dataclass(frozen=True, slots=True)
class Head:
    """A family with a collective and a number of skipped reduce steps."""

    family: Family
    collective: str
    skip: int

    @property
    def key(self) -> tuple[FamilyKey, str, int]:
        """Return what an option of this head has in common with the others."""
        return (self.family.compressor, self.family.settings), self.collective, self.skip


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rounds of one family, summed per kind: ratios (points,), tables (points, B, kinds)."""

    ratios: Floats
    counts: Floats
    sizes: Floats
    single_round: bool


def usable(family: Family, buckets: int) -> bool:
    """Return whether a family came with sane rounds for every bucket."""
    return bool(family.ladder) and all(
        0 < point.ratio <= 1
        and len(point.buckets) == buckets
        and all(r.bytes >= 0 and r.collective in REQUESTS for b in point.buckets for r in b.rounds)
        for point in family.ladder
    )


def make_heads(
    families: Sequence[Family],
    world_size: int,
    ratios: int,
    *,
    skips: bool,
    collectives: Sequence[str] = COSTED,
) -> list[Head]:
    """Return families x collectives x skips, thinned to stay below MAX_OPTIONS.

    Args:
        families: Usable families.
        world_size: Ranks N.
        ratios: Ratios of each family.
        skips: Whether steps may be skipped at all.
        collectives: Carriers that may be chosen; those without a cost never are.
    """
    pairs = [
        (family, collective)
        for family in families
        for collective in COSTED
        if collective in family.collectives and collective in collectives
    ]
    furthest = [most_skipped(c, world_size) if skips and _skippable(f) else 0 for f, c in pairs]
    budget = MAX_OPTIONS // max(ratios, 1) - len(pairs)
    skipping = sum(most > 0 for most in furthest)
    share = max(budget // max(skipping, 1), 0)
    heads = []
    for (family, collective), most in zip(pairs, furthest, strict=True):
        counts = np.unique(np.linspace(0, most, 1 + min(most, share)).round().astype(int))
        heads += [Head(family, collective, int(skip)) for skip in counts]
    return heads


def _skippable(family: Family) -> bool:
    """Return whether any round of a family may leave out steps."""
    return any(
        r.collective == "all_reduce" and r.skippable
        for b in family.ladder[0].buckets
        for r in b.rounds
    )


def ratio_grid(ratios: Floats, most: int) -> Floats:
    """Return a log grid between the ends of a ladder; inner points have three digits."""
    low, high = float(ratios[0]), float(ratios[-1])
    if low == high:
        return np.array([low])
    grid = np.geomspace(low, high, max(most, 2))
    inner = [float(f"{ratio:.3g}") for ratio in grid[1:-1]]
    return np.unique([low, *(r for r in inner if low < r < high), high])


def sum_rounds(family: Family) -> Ladder:
    """Sum the rounds of a family per kind."""
    points = sorted({p.ratio: p for p in family.ladder}.values(), key=lambda p: p.ratio)
    shape = (len(points), len(points[0].buckets), len(KINDS))
    counts, sizes = np.zeros(shape), np.zeros(shape)
    single = True
    for p, point in enumerate(points):
        for b, bucket in enumerate(point.buckets):
            single &= len(bucket.rounds) == 1
            for r in bucket.rounds:
                fixed = r.collective == "all_reduce" and not r.skippable
                kind = KINDS.index("fixed" if fixed else r.collective)
                counts[p, b, kind] += 1
                sizes[p, b, kind] += r.bytes
    single &= bool(counts[:, :, 2:].sum() == 0)
    return Ladder(np.array([p.ratio for p in points]), counts, sizes, single)


def carriers(head: Head, world_size: int, backend: str) -> tuple[Floats, Floats]:
    """Return the (a, b) coefficients of every kind of round under a head's collective."""
    carrier = carried_by("all_reduce", head.collective)
    others = (carried_by(kind, head.collective) for kind in KINDS[2:])
    used = ((carrier, head.skip), (carrier, 0), *((kind, 0) for kind in others))
    pairs = np.array([coefficients(name, world_size, skip, backend) for name, skip in used])
    return pairs[:, 0], pairs[:, 1]


def current_options(inputs: Inputs) -> tuple[Option, ...]:
    """Return the option of every bucket under the plan in force; empty if there is none."""
    plan = inputs.current
    if plan is None:
        return ()
    known = {a.bucket: a.option for a in plan.assignments}
    return tuple(known.get(b.fingerprint, plan.default) for b in inputs.layout.buckets)


def bucket_groups(elements: Floats, most: int) -> Indices:
    """Group buckets by size, numbered in layout order of their first bucket.

    Cuts are made where sorted logarithms of sizes leave the widest gaps; gaps below a factor of 1.5
    join.
    """
    logs = np.log(elements)
    distinct = np.unique(logs)
    gaps = np.diff(distinct)
    wide = [i for i in np.argsort(-gaps, kind="stable")[: most - 1] if gaps[i] > np.log(1.5)]
    bounds = np.sort(distinct[np.array(wide, dtype=np.intp) + 1])
    by_size = np.searchsorted(bounds, logs, side="right")
    _, first, inverse = np.unique(by_size, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    groups: Indices = rank[inverse].astype(np.intp)
    return groups


def group_starts(groups: Indices) -> Indices:
    """Return the first bucket of every group, in layout order."""
    starts: Indices = np.unique(groups, return_index=True)[1].astype(np.intp)
    return starts

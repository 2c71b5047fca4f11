"""Search over candidates that give bucket groups different options.

Coding: per bucket group two integers, the head and the level of its ratio grid. NSGA-II covers the
front, an exact search in one group at a time settles the cheapest candidate.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.evaluation import Evaluation
from gradpilot.policies.front import knee, non_dominated
from gradpilot.policies.nsga import GENERATIONS, POPULATION, Search, nsga2
from gradpilot.policies.problem import Space

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

EXACT = 20_000
"""Products of options over groups up to this many are enumerated instead."""

PENALTY = 1e6
"""Added to every objective of a candidate that may not be chosen; grows with the violation."""


def nsga2_uniform(
    space: Space, seed: int, *, population: int = POPULATION, generations: int = GENERATIONS
) -> Evaluation:
    """Search the uniform space as if it were too large; for comparison with the exact answer."""
    groups = np.zeros(len(space.inputs.layout.buckets), dtype=np.intp)
    found, _ = search_groups(space, groups, seed, population=population, generations=generations)
    return found


def per_bucket(
    space: Space,
    uniform: Evaluation,
    groups: Indices,
    allowed: Callable[[Evaluation], NDArray[np.bool_]],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Evaluation, str]:
    """Return candidates that give bucket groups different options, and how they were found.

    Args:
        space: Options and models.
        uniform: All uniform candidates; the best of them seed the search.
        groups: Group of every bucket, numbered from 0 in layout order.
        allowed: Which candidates may be chosen.
        clock: Source of seconds.
    """
    numbers = np.flatnonzero(uniform.valid)
    count = int(groups.max()) + 1
    if len(numbers) ** count <= EXACT:
        product = np.array(list(itertools.product(numbers, repeat=count)), dtype=np.intp)
        return space.evaluate(product[:, groups]), f"all {len(product)} combinations"
    started = clock()
    seconds = space.inputs.settings.solver_seconds
    evaluation, search = search_groups(
        space,
        groups,
        space.inputs.seed,
        _seeds(space, uniform, groups, allowed),
        allowed=allowed,
        seconds=seconds,
        clock=clock,
    )
    how = f"NSGA-II over {count} groups, {len(search.points)} points"
    stopped = search.stopped
    fit = np.flatnonzero(allowed(evaluation))
    if len(fit):
        best = evaluation.rows[fit[int(evaluation.cost[fit].argmin())]]
        left = seconds - (clock() - started)
        polished, late = polish(space, groups, best, numbers, allowed, seconds=left, clock=clock)
        evaluation = evaluation.join(polished)
        stopped |= late
    return evaluation, how + (", stopped by the clock" if stopped else "")


def polish(
    space: Space,
    groups: Indices,
    row: Indices,
    numbers: Indices,
    allowed: Callable[[Evaluation], NDArray[np.bool_]],
    *,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Evaluation, bool]:
    """Improve step time / efficiency by exact search in one group at a time, until none helps.

    NSGA-II covers the front but is slow to settle the last group: on its own it left up to 1.2 % of
    the cost here, for a few milliseconds of work.

    Args:
        space: Options and models.
        groups: Group of every bucket.
        row: Option number of every bucket to start from, (B,).
        numbers: Options to try.
        allowed: Which candidates may be chosen.
        seconds: Wall-clock cap, looked at between groups.
        clock: Source of seconds.

    Returns:
        The candidate found, and whether the clock stopped the search.
    """
    started = clock()
    row = row.copy()
    found = space.evaluate(row[None])
    settled, turn, count = 0, 0, int(groups.max()) + 1
    while settled < count:
        if clock() - started > seconds:
            return found, True
        rows = np.repeat(row[None], len(numbers), axis=0)
        rows[:, groups == turn] = numbers[:, None]
        tried = space.evaluate(rows)
        cost = np.where(allowed(tried), tried.cost, np.inf)
        best = int(cost.argmin())
        settled += 1
        if cost[best] < found.cost[0] * (1 - 1e-9):
            row, settled = rows[best], 1
            found = space.evaluate(row[None])
        turn = (turn + 1) % count
    return found, False


def search_groups(
    space: Space,
    groups: Indices,
    seed: int,
    initial: Indices | None = None,
    *,
    allowed: Callable[[Evaluation], NDArray[np.bool_]] | None = None,
    population: int = POPULATION,
    generations: int = GENERATIONS,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Evaluation, Search]:
    """Search options per bucket group with NSGA-II.

    Args:
        space: Options and models.
        groups: Group of every bucket, numbered from 0.
        seed: Seed of everything random.
        initial: Option numbers per group to start from, (points, G).
        allowed: Which candidates may be chosen; others are pushed behind them.
        population: Points per generation.
        generations: Most generations.
        seconds: Wall-clock cap.
        clock: Source of seconds.

    Returns:
        Every candidate that was looked at, and the search.
    """
    count = int(groups.max()) + 1
    heads = _known_heads(space)

    def rows(points: Indices) -> Indices:
        numbers = space.decode(heads[points[:, :count]], points[:, count:])
        return numbers[:, groups]

    def canonical(points: Indices) -> Indices:
        at = heads[points[:, :count]]
        levels = space.encode(space.decode(at, points[:, count:]))[1]
        return np.concatenate([points[:, :count], levels], axis=1)

    def evaluate(points: Indices) -> Floats:
        found = space.evaluate(rows(points))
        # With the cost that ``tta`` chooses by as an objective its least value is an extreme of
        # the front, which NSGA-II never drops; without, the choice was no better than its seeds.
        values = np.concatenate([found.objectives, found.cost[:, None]], axis=1)
        values = np.where(np.isfinite(values), values, 1e3)
        banned = np.zeros(len(points)) if allowed is None else (~allowed(found)).astype(np.float64)
        short = np.nan_to_num(1 - found.credit, nan=1.0)
        return values + (PENALTY * banned * (1 + short))[:, None]

    if initial is not None:
        place = {int(h): i for i, h in enumerate(heads)}
        chosen, levels = space.encode(initial)
        known = np.isin(chosen, heads).all(axis=1)
        coded = np.array([[place[int(h)] for h in row] for row in chosen[known]], dtype=np.intp)
        initial = np.concatenate([coded.reshape(-1, count), levels[known]], axis=1)
    upper = np.concatenate(
        [np.full(count, len(heads) - 1), np.full(count, space.levels - 1)]
    ).astype(np.intp)
    search = nsga2(
        evaluate, upper, seed, canonical=canonical, initial=initial, population=population,
        generations=generations, seconds=seconds, clock=clock,
    )  # fmt: skip
    return space.evaluate(rows(search.points)), search


def _known_heads(space: Space) -> Indices:
    """Return the heads all of whose costs are known."""
    table = space.table
    assert table is not None
    finite = np.isfinite(table.compress + table.decompress + table.latency + table.transfer)
    bad = np.unique(table.head[~finite.all(axis=1)])
    return np.setdiff1d(np.arange(len(space.heads)), bad).astype(np.intp)


def _seeds(
    space: Space,
    uniform: Evaluation,
    groups: Indices,
    allowed: Callable[[Evaluation], NDArray[np.bool_]],
) -> Indices:
    """Return option numbers per group, (seeds, G): plan in force, best, knee, front."""
    starts = np.unique(groups, return_index=True)[1]
    seeds = []
    present = space.present()
    if present is not None:
        seeds.append(present.rows[0][starts])
    fit = np.flatnonzero(allowed(uniform))
    if len(fit):
        front = fit[non_dominated(uniform.objectives[fit])]
        picks = [int(fit[int(uniform.cost[fit].argmin())])]
        at = knee(uniform.objectives[front])
        if at is not None:
            picks.append(int(front[at]))
        spread = front[np.argsort(uniform.synchronisation_seconds[front], kind="stable")]
        picks += [int(k) for k in spread[:: max(1, len(spread) // (POPULATION // 3))]]
        seeds += [np.full(len(starts), uniform.rows[k, 0]) for k in dict.fromkeys(picks)]
    return np.array(seeds[: POPULATION // 2], dtype=np.intp).reshape(-1, len(starts))

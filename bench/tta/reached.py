"""When a training reached a target: smoothing and interpolation, the same for all methods.

A metric is smoothed by the mean of the last ``WIDTH`` evaluations, so a target is reached when that
mean is, not when one lucky evaluation is. Between two evaluations the smoothed curve is taken to be
straight, since evaluations are some per cent of a training apart and methods may differ by less.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.tta.tasks import Task

WIDTH = 3

LAST = 3
"""The final value is the mean of so many evaluations, at a learning rate near 0."""


def smooth(values: Sequence[float | None], width: int = WIDTH) -> list[float | None]:
    """Return the trailing mean; None where it has too few values or one that is not finite."""
    found: list[float | None] = []
    for i in range(len(values)):
        part = [value for value in values[max(0, i - width + 1) : i + 1] if value is not None]
        found.append(statistics.fmean(part) if len(part) == width else None)
    return found


def when(
    places: Sequence[float], smoothed: Sequence[float | None], target: float, more: bool
) -> float | None:
    """Return the place (seconds, or steps) at which a smoothed curve reaches a target.

    Args:
        places: Where the curve has values, ascending.
        smoothed: The values.
        target: What to reach.
        more: Whether more is better.
    """
    before: tuple[float, float] | None = None
    for place, value in zip(places, smoothed, strict=True):
        if value is None:
            before = None
            continue
        if value >= target if more else value <= target:
            if before is None or before[1] == value:
                return place
            share = (target - before[1]) / (value - before[1])
            return before[0] + share * (place - before[0])
        before = (place, value)
    return None


def seconds_to(row: Mapping[str, Any], task: Task, target: float) -> float | None:
    """Return after how many seconds a row reached a target; None if it did not."""
    at = [row["ends"][step] for step in row["evaluated_steps"]]
    return when(at, smooth(row["values"]), target, task.more_is_better)


def steps_to(row: Mapping[str, Any], task: Task, target: float) -> float | None:
    """Return after how many steps a row reached a target; None if it did not."""
    at = [step + 1.0 for step in row["evaluated_steps"]]
    return when(at, smooth(row["values"]), target, task.more_is_better)


def final(row: Mapping[str, Any]) -> float | None:
    """Return the final value of a row; None if it is not finite."""
    return smooth(row["values"], LAST)[-1] if len(row["values"]) >= LAST else None


def strictest(rows: Sequence[Mapping[str, Any]], task: Task) -> float | None:
    """Return the hardest target that all of some rows reach; None if there is none."""
    for target in reversed(task.targets):
        if rows and all(seconds_to(row, task, target) is not None for row in rows):
            return target
    return None

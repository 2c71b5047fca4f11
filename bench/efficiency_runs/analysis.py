"""From curves to efficiency, and from statistics to efficiency: pure functions on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

Floats = NDArray[np.float64]

FRACTIONS = (0.25, 0.4, 0.6)
"""Targets are the losses that dense training has after these shares of the steps."""

SMOOTHED = 3
"""Evaluations of a centred rolling mean."""

WORST = 0.01
"""Efficiency of a training that diverged."""


def smooth(curve: ArrayLike, width: int = SMOOTHED) -> Floats:
    """Return the centred rolling mean of a curve; shorter windows at its ends."""
    values = np.asarray(curve, dtype=np.float64)
    reach = width // 2
    return np.array([values[max(0, i - reach) : i + reach + 1].mean() for i in range(len(values))])


def steps_to(curve: ArrayLike, every: int, target: float, start: float) -> float:
    """Return after how many steps a curve first is as low as a target; NaN if it never is.

    Args:
        curve: Losses after ``every``, ``2 every``, ... steps.
        every: Steps between two of them.
        target: The loss to reach.
        start: Loss before the first step.
    """
    values = np.concatenate(([start], np.asarray(curve, dtype=np.float64)))
    low = np.flatnonzero(values <= target)
    if not len(low):
        return float("nan")
    after = int(low[0])
    if after == 0:
        return 0.0
    above, below = values[after - 1], values[after]
    return float(every * (after - 1 + (above - target) / (above - below)))


def targets(dense: ArrayLike, fractions: Sequence[float] = FRACTIONS) -> list[float]:
    """Return the losses that dense training has reached after shares of its steps."""
    lowest = np.minimum.accumulate(np.asarray(dense, dtype=np.float64))
    at = [max(0, round(share * len(lowest)) - 1) for share in fractions]
    return [float(lowest[i]) for i in at]


def efficiency(
    dense: ArrayLike,
    curve: ArrayLike,
    goals: Sequence[float],
    every: int,
    start: float,
    steps: int,
) -> tuple[float, float]:
    """Return the progress of a step relative to a dense step, and the share of targets reached.

    Steps that dense training needs to a loss over the steps that the method needs, geometric mean
    over targets. Where a method does not reach a target, what it did reach takes its place: dense
    training is that far after fewer steps, and all steps of the method were needed for it.

    Args:
        dense: Smoothed losses of dense training with the same seed.
        curve: Smoothed losses of the method.
        goals: Losses to reach.
        every: Steps between two of them.
        start: Loss before the first step.
        steps: Steps of the training.
    """
    ratios, reached = [], 0
    lowest = min(start, float(np.min(curve, initial=start)))
    for target in goals:
        own = steps_to(curve, every, target, start)
        if np.isnan(own):
            spent, needed = float(steps), steps_to(dense, every, lowest, start)
        else:
            reached += 1
            spent, needed = max(own, 1e-9), steps_to(dense, every, target, start)
        # A dense training that misses a goal which is that of their mean needed all its steps.
        ratio = (steps if np.isnan(needed) else needed) / spent
        ratios.append(max(ratio, WORST))
    return float(np.exp(np.mean(np.log(ratios)))), reached / len(ratios)


def rank_correlation(x: ArrayLike, y: ArrayLike) -> float:
    """Return Spearman's rank correlation, ties by mean rank; 0 if one of both is constant."""
    return float(_rank_correlations(np.atleast_2d(x), np.atleast_2d(y))[0])


def _rank_correlations(x: Floats, y: Floats) -> Floats:
    """Return the rank correlation of every row."""
    a, b = (rankdata(v, axis=1) - (v.shape[1] + 1) / 2 for v in (x, y))
    scale = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    found: Floats = (a * b).sum(1) / np.where(scale > 0, scale, 1.0)
    return found


def interval(
    x: ArrayLike, y: ArrayLike, rounds: int = 1000, share: float = 0.9, seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap interval of a rank correlation, resampled by methods."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(len(a), size=(rounds, len(a)))
    found = _rank_correlations(a[chosen], b[chosen])
    low, high = np.quantile(found, ((1 - share) / 2, (1 + share) / 2))
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Exponent:
    """A fit of ``efficiency = gain ** exponent``.

    Attributes:
        exponent: Least squares in the logarithm, through the origin; NaN if no gain is below 1.
        error: Standard error of the exponent; NaN from fewer than two points.
        rms: Root mean square of what is left, as a factor of efficiency less 1.
        mean: Geometric mean of the efficiencies, which is all that can be said where gains are 1.
        points: Number of points.
    """

    exponent: float
    error: float
    rms: float
    mean: float
    points: int


def exponent(gains: ArrayLike, efficiencies: ArrayLike) -> Exponent:
    """Fit the exponent of a family."""
    x = np.log(np.asarray(gains, dtype=np.float64))
    y = np.log(np.asarray(efficiencies, dtype=np.float64))
    weight = float(x @ x)
    # Gains of sums of rounded squares end within some percent of 1: no lever to fit by.
    slope = float(x @ y) / weight if float(np.abs(x).max()) > 0.05 else float("nan")
    left = y - (slope if np.isfinite(slope) else 0.0) * x
    spread = float(np.sqrt(np.mean(left**2)))
    error = float("nan")
    if len(x) > 1 and np.isfinite(slope):
        error = float(np.sqrt(left @ left / (len(x) - 1) / weight))
    return Exponent(slope, error, float(np.expm1(spread)), float(np.exp(y.mean())), len(x))


@dataclass(frozen=True, slots=True)
class Threshold:
    """How well a quantity tells trainings that will diverge from the others.

    Attributes:
        at: Divergence is foretold above this.
        alarms: Share of the others that lie above it too.
        misses: Share of the diverged ones that do not.
        area: Chance that a diverged one has the larger value (area under the ROC curve).
        diverged: Number of diverged ones.
        others: Number of the others.
    """

    at: float
    alarms: float
    misses: float
    area: float
    diverged: int
    others: int


def threshold(values: ArrayLike, diverged: ArrayLike, most_alarms: float = 1.0) -> Threshold:
    """Return where alarms and misses together are fewest.

    Args:
        values: Quantity of every training.
        diverged: Whether it diverged.
        most_alarms: Largest share of false alarms.

    Raises:
        ValueError: All diverged, or none.
    """
    x = np.asarray(values, dtype=np.float64)
    bad = np.asarray(diverged, dtype=bool)
    if bad.all() or not bad.any():
        raise ValueError("a threshold needs trainings of both kinds")
    ranks = rankdata(x)
    count, rest = int(bad.sum()), int((~bad).sum())
    area = (ranks[bad].sum() - count * (count + 1) / 2) / (count * rest)
    edges = np.unique(x)
    found = []
    for low, high in zip(edges, np.append(edges[1:], edges[-1]), strict=True):
        # In the middle between neighbours, by their ratio.
        at = float(np.sqrt(low * high)) if low > 0 else float((low + high) / 2)
        alarms, misses = float((x[~bad] > at).mean()), float((x[bad] <= at).mean())
        if alarms <= most_alarms:
            found.append((alarms + misses, at, alarms, misses))
    _, at, alarms, misses = min(found)
    return Threshold(at, alarms, misses, float(area), count, rest)

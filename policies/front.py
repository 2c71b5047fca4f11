"""Pareto front and single points on it. Everything is minimised; rows with NaN never win.

pymoo's own helpers are not used: one NaN row wins its non-dominated sort, and its pseudo-weights
divide by zero when an objective is flat over the front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


BLOCK = 32
"""Front points that are compared with the rest at once."""


def non_dominated(objectives: Floats) -> Indices:
    """Return the indices of the Pareto front, ascending; of equal rows the first stands for all.

    Args:
        objectives: (P, M); rows with a NaN or infinity are left out first.
    """
    rows = np.flatnonzero(np.isfinite(objectives).all(axis=1))
    if len(rows) == 0:
        return rows
    # Ranks instead of values: whoever dominates has the smaller sum, exactly and without overflow,
    # so in order of the sum no later row dominates an earlier one and every survivor is final.
    columns = objectives[rows].T
    left = np.stack([np.unique(c, return_inverse=True)[1].astype(np.int64) for c in columns])
    order = np.argsort(left.sum(axis=0), kind="stable")
    left, rows = left[:, order], rows[order]
    front: list[Indices] = []
    while len(rows):
        best, found = left[:, :BLOCK], rows[:BLOCK]
        lower = (best[:, None, :] < best[:, :, None]).any(axis=0)  # j is below i somewhere
        keep = (lower | np.tri(len(found), dtype=np.bool_)).all(axis=0)  # j against every i < j
        best, found = best[:, keep], found[keep]
        front.append(found)
        left, rows = left[:, BLOCK:], rows[BLOCK:]
        keep = (left[:, None, :] < best[:, :, None]).any(axis=0).all(axis=0)
        left, rows = left[:, keep], rows[keep]
    return np.sort(np.concatenate(front))


def normalise(objectives: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Scale every column to 0 .. 1; return those that vary, and which columns do."""
    low, high = objectives.min(axis=0), objectives.max(axis=0)
    scale = np.maximum(np.abs(low), np.abs(high))
    varies = (high - low) > 1e-12 * np.maximum(scale, 1e-300)
    return (objectives[:, varies] - low[varies]) / (high[varies] - low[varies]), varies


def knee_values(objectives: Floats) -> Floats:
    """Return each row's distance behind the hyperplane through the extremes; least is the knee."""
    scaled, _ = normalise(objectives)
    if scaled.shape[1] == 0:
        return np.zeros(len(objectives))
    values: Floats = scaled.mean(axis=1)
    return values


def weighted_values(objectives: Floats, weights: Sequence[float]) -> Floats:
    """Return max_i w_i f_i of the scaled objectives, with a trace of their sum against ties.

    Weights are non-negative; if none is positive all count alike.
    """
    wanted = np.nan_to_num(np.array(weights, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    wanted = np.maximum(wanted, 0.0)
    if wanted.sum() <= 0:
        wanted = np.ones(objectives.shape[1])
    scaled, varies = normalise(objectives)
    if not varies.any():
        return np.zeros(len(objectives))
    scaled = scaled * (wanted[varies] / wanted.sum())
    values: Floats = scaled.max(axis=1) + 1e-6 * scaled.sum(axis=1)
    return values


def knee(objectives: Floats) -> int | None:
    """Return the index of the knee of a front; None if no row is finite."""
    return _least(objectives, knee_values)


def weighted(objectives: Floats, weights: Sequence[float]) -> int | None:
    """Return the index of the row with the least weighted worst objective; None if none is finite.

    Args:
        objectives: (P, M).
        weights: One per objective.
    """
    return _least(objectives, lambda rows: weighted_values(rows, weights))


def _least(objectives: Floats, values: Callable[[Floats], Floats]) -> int | None:
    rows = np.flatnonzero(np.isfinite(objectives).all(axis=1))
    if len(rows) == 0:
        return None
    return int(rows[int(values(objectives[rows]).argmin())])

"""Which candidate to take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.base import PolicySettings
from gradpilot.policies.evaluation import Evaluation
from gradpilot.policies.front import knee_values, non_dominated, weighted_values

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

TIE = 1e-6
"""Relative difference of costs below which the safer candidate is taken."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidate taken.

    Attributes:
        index: Its number in the evaluation.
        front: Numbers of the Pareto front of what was allowed, ascending.
        pays: False if no compression beats dense or bf16 by enough, so that one of them was taken.
    """

    index: int
    front: Indices
    pays: bool = True


def allowed(
    evaluation: Evaluation, settings: PolicySettings, banned: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """Return which candidates may be taken: finite, and above the gain floor or safe.

    Args:
        evaluation: Candidates.
        settings: For the gain floor.
        banned: Options that are black-listed, (K,); None if none is.
    """
    enough = evaluation.credit >= settings.gain_floor
    fit: NDArray[np.bool_] = evaluation.valid & (enough | evaluation.safe)
    return fit if banned is None else fit & ~banned[evaluation.rows].any(axis=1)


def choose(
    evaluation: Evaluation, settings: PolicySettings, banned: NDArray[np.bool_] | None = None
) -> Choice | None:
    """Return what to take; None if nothing may be taken.

    ``tta`` takes the least step time / efficiency, whether or not that lies on the front of the
    three objectives; whatever is not dense or bf16 must beat them by ``min_improvement``. ``knee``
    and ``weighted`` take a point of the front.

    Args:
        evaluation: Candidates.
        settings: How to choose.
        banned: See ``allowed``.
    """
    fit = np.flatnonzero(allowed(evaluation, settings, banned))
    if len(fit) == 0:
        return None
    front = fit[non_dominated(evaluation.objectives[fit])]
    if settings.choice == "knee":
        return Choice(int(front[int(knee_values(evaluation.objectives[front]).argmin())]), front)
    if settings.choice == "weighted":
        values = weighted_values(evaluation.objectives[front], settings.weights)
        return Choice(int(front[int(values.argmin())]), front)
    safe = fit[evaluation.safe[fit]]
    bold = fit[~evaluation.safe[fit]]
    if len(safe) == 0:
        return Choice(_cheapest(evaluation, bold), front)
    best = _cheapest(evaluation, safe)
    if len(bold) == 0:
        return Choice(best, front, pays=False)
    rival = _cheapest(evaluation, bold)
    margin = 1 - settings.min_improvement
    if evaluation.cost[rival] < evaluation.cost[best] * margin:
        return Choice(rival, front)
    return Choice(best, front, pays=False)


def improvement(
    evaluation: Evaluation, choice: Choice, reference: Evaluation, settings: PolicySettings
) -> float:
    """Return the share of the reference's cost that the choice saves.

    For ``tta`` cost is step time / efficiency. For ``knee`` and ``weighted`` it is the value that
    these minimise, scaled over front and reference together.
    """
    if settings.choice not in ("knee", "weighted"):
        old = float(reference.cost[0])
        return 1 - float(evaluation.cost[choice.index]) / old if old > 0 else float("nan")
    rows = np.concatenate([evaluation.objectives[choice.front], reference.objectives[:1]], axis=0)
    if not np.isfinite(rows).all():
        return float("nan")
    if settings.choice == "knee":
        values = knee_values(rows)
    else:
        values = weighted_values(rows, settings.weights)
    new = values[:-1][choice.front == choice.index][0]
    return 1 - float(new / values[-1]) if values[-1] > 0 else 0.0


def safest(
    evaluation: Evaluation, settings: PolicySettings, banned: NDArray[np.bool_] | None = None
) -> int | None:
    """Return the cheapest of the candidates that send everything; None if none may be taken.

    Args:
        evaluation: Candidates.
        settings: See ``allowed``.
        banned: See ``allowed``.
    """
    fit = np.flatnonzero(allowed(evaluation, settings, banned) & evaluation.safe)
    return _cheapest(evaluation, fit) if len(fit) else None


def _cheapest(evaluation: Evaluation, among: Indices) -> int:
    """Return the least cost; among equals the most efficient, then the least work."""
    cost = evaluation.cost[among]
    ties = among[cost <= cost.min() * (1 + TIE)]
    work = evaluation.compression_seconds[ties] + evaluation.synchronisation_seconds[ties]
    return int(ties[np.lexsort((work, -evaluation.efficiency[ties]))[0]])

"""The best candidates of a decision for people, ranked by what the choice goes by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.base import PolicySettings
from gradpilot.policies.choice import Choice, allowed
from gradpilot.policies.evaluation import Evaluation
from gradpilot.policies.front import knee_values, weighted_values
from gradpilot.policies.problem import Space
from gradpilot.protos.explanations import BANNED, BELOW_FLOOR, CHOSEN, IN_FORCE, Ranked

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

BEST = 5
"""Candidates that may be taken and are told."""


def best(
    space: Space,
    evaluation: Evaluation,
    choice: Choice,
    settings: PolicySettings,
    banned: NDArray[np.bool_],
    present: Evaluation | None,
) -> tuple[Ranked, ...]:
    """Return what people should compare, best first.

    That is the best of each method among what may be taken, at most ``BEST``; the choice; what is
    in use; and what would be better than the choice but is black-listed or else below the floor,
    one of either. A method is a compressor with its settings and carrier, with or without skips:
    its neighbours in ratio would tell nothing new. Candidates with several options are one method.

    Args:
        space: Options and models.
        evaluation: Candidates.
        choice: What was chosen of them.
        settings: How it was chosen, with the floor of gain that holds now.
        banned: See ``Watch.banned``; options added since then are not black-listed.
        present: Prediction for what is in use; None if unknown.
    """
    banned = np.pad(banned, (0, max(len(space) - len(banned), 0)))
    if present is not None:
        evaluation = evaluation.join(present)
    mine = len(evaluation.gain) - 1 if present is not None else -1
    fit = allowed(evaluation, settings, banned)
    if mine >= 0:
        fit[mine] = False  # it may be among the candidates, too, and is added in any case
    free = np.flatnonzero(fit)
    if settings.choice in ("knee", "weighted"):
        free = choice.front
    ranked = free[np.argsort(_values(evaluation, settings, free), kind="stable")]
    methods = _methods(space, evaluation.rows)
    first = np.unique(methods[ranked], return_index=True)[1]
    rows = ranked[np.sort(first)[:BEST]].tolist()
    if choice.index not in rows:
        rows.append(choice.index)
    barred: NDArray[np.bool_] = np.logical_or.reduce(banned[evaluation.rows], axis=1)
    low = np.asarray(~evaluation.safe & (evaluation.credit < settings.gain_floor))
    better = evaluation.valid & (evaluation.cost < evaluation.cost[choice.index])
    for reason in (barred & ~low, low & ~barred):
        if (forbidden := np.flatnonzero(better & reason & ~fit)).size:
            rows.append(int(forbidden[evaluation.cost[forbidden].argmin()]))
    if present is not None:
        rows = [i for i in rows if not _same(evaluation, i, mine)]
        if evaluation.valid[mine]:
            rows.append(mine)
    rows = list(dict.fromkeys(rows))
    if settings.choice not in ("knee", "weighted"):
        rows.sort(key=lambda i: float(evaluation.cost[i]))
    chosen = evaluation.rows[choice.index]
    return tuple(
        Ranked(
            space.candidate(evaluation, i),
            _marks(
                in_force=i == mine and bool(space.current_options),
                chosen=np.array_equal(evaluation.rows[i], chosen),
                banned=bool(barred[i]),
                low=bool(low[i]),
            ),
        )
        for i in rows
    )


def _values(evaluation: Evaluation, settings: PolicySettings, among: Indices) -> Floats:
    """Return what the choice minimises, for these candidates."""
    if settings.choice == "knee":
        return knee_values(evaluation.objectives[among])
    if settings.choice == "weighted":
        return weighted_values(evaluation.objectives[among], settings.weights)
    return np.asarray(evaluation.cost[among], dtype=np.float64)


def _methods(space: Space, rows: Indices) -> Indices:
    """Return a number for the method of every candidate, (P,); -1 for those with several."""
    table = space.table
    assert table is not None
    numbers: dict[object, int] = {}
    of_head = np.array(
        [
            numbers.setdefault((head.key[0], head.collective, head.skip > 0), len(numbers))
            for head in space.heads
        ],
        dtype=np.intp,
    )
    found = of_head[table.head[rows]]
    alike = (found == found[:, :1]).all(axis=1)
    return np.where(alike, found[:, 0], -1)


def _same(evaluation: Evaluation, i: int, mine: int) -> bool:
    return np.array_equal(evaluation.rows[i], evaluation.rows[mine])


def _marks(*, in_force: bool, chosen: bool, banned: bool, low: bool) -> tuple[str, ...]:
    pairs = ((in_force, IN_FORCE), (chosen, CHOSEN), (banned, BANNED), (low, BELOW_FLOOR))
    return tuple(mark for holds, mark in pairs if holds)

"""Models that foretell efficiency from what can be known of a method, and how well they do.

Every model is fitted by least squares to the logarithm of efficiency on one task and judged on the
other, since that is how it is used: on a job that nobody has calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Points:
    """Methods on tasks, one entry each.

    Attributes:
        tasks: Name of the task.
        families: Family of the method.
        statistics: Values by name of the statistic.
        efficiencies: Progress of a step relative to a dense step.
    """

    tasks: tuple[str, ...]
    families: tuple[str, ...]
    statistics: Mapping[str, Floats]
    efficiencies: Floats

    def where(self, chosen: Sequence[bool] | NDArray[np.bool_]) -> Points:
        """Return some of the points."""
        mask = np.asarray(chosen, dtype=bool)
        return Points(
            tuple(t for t, m in zip(self.tasks, mask, strict=True) if m),
            tuple(f for f, m in zip(self.families, mask, strict=True) if m),
            {name: values[mask] for name, values in self.statistics.items()},
            self.efficiencies[mask],
        )


Predictor = Callable[[Points], Floats]
"""Returns log efficiency of every point."""

Model = Callable[[Points], Predictor]
"""Fits itself to points."""


def unity(points: Points) -> Predictor:
    """Take every step to be worth a dense step."""
    return lambda other: np.zeros(len(other.tasks))


def constant(points: Points) -> Predictor:
    """Fit one efficiency for all."""
    level = float(np.log(points.efficiencies).mean())
    return lambda other: np.full(len(other.tasks), level)


def power(statistic: str = "gain") -> Model:
    """Return the model ``statistic ** e`` with one exponent for all."""

    def fit(points: Points) -> Predictor:
        x, y = np.log(points.statistics[statistic]), np.log(points.efficiencies)
        e = float(x @ y) / max(float(x @ x), 1e-30)
        return lambda other: e * np.log(other.statistics[statistic])

    return fit


def power_by_family(statistic: str = "gain") -> Model:
    """Return the model ``statistic ** e`` with an exponent for every family.

    A family that was not there gets the exponent of all others together.
    """

    def fit(points: Points) -> Predictor:
        fits = {
            family: power(statistic)(points.where([f == family for f in points.families]))
            for family in set(points.families)
        }
        rest = power(statistic)(points)

        def predict(other: Points) -> Floats:
            found = rest(other)
            for i, family in enumerate(other.families):
                if family in fits:
                    found[i] = fits[family](other)[i]
            return found

        return predict

    return fit


def saturating(statistic: str) -> Model:
    """Return the model ``(1 + statistic / c) ** -e``: as good as dense until it grows past c."""

    def fit(points: Points) -> Predictor:
        c, e = saturation(points.statistics[statistic], np.log(points.efficiencies))
        return lambda other: -e * np.log1p(other.statistics[statistic] / c)

    return fit


def saturating_by_family(statistic: str) -> Model:
    """Return the same with one c for all and an exponent for every family.

    A family that was not there gets the exponent of all others together.
    """

    def fit(points: Points) -> Predictor:
        log = np.log(points.efficiencies)
        c, e = saturation(points.statistics[statistic], log)
        exponents = {}
        for family in set(points.families):
            own = np.array([f == family for f in points.families])
            exponents[family] = saturation_exponent(points.statistics[statistic][own], log[own], c)
        return lambda other: np.array(
            [
                -exponents.get(family, e) * np.log1p(x / c)
                for family, x in zip(other.families, other.statistics[statistic], strict=True)
            ]
        )

    return fit


def saturation(x: Floats, y: Floats) -> tuple[float, float]:
    """Fit ``y = -e log(1 + x / c)`` and return (c, e); c on a grid of half octaves."""
    positive = x[x > 0]
    if not len(positive):
        return 1.0, 0.0
    best = (np.inf, 1.0, 0.0)
    for c in 2.0 ** np.arange(np.log2(positive.min()) - 2, np.log2(positive.max()) + 2, 0.5):
        basis = -np.log1p(x / c)
        e = saturation_exponent(x, y, float(c))
        best = min(best, (float(np.sum((y - e * basis) ** 2)), float(c), e))
    return best[1], best[2]


def saturation_exponent(x: Floats, y: Floats, c: float) -> float:
    """Return the e of ``y = -e log(1 + x / c)`` by least squares, at least 0."""
    basis = -np.log1p(x / c)
    weight = float(basis @ basis)
    return max(0.0, float(basis @ y) / weight) if weight > 0 else 0.0


def error_within(model: Model, points: Points) -> float:
    """Return the root mean square error of log efficiency on the points it is fitted to."""
    left = model(points)(points) - np.log(points.efficiencies)
    return float(np.sqrt(np.mean(left**2)))


def error_across(model: Model, points: Points) -> float:
    """Return the same of every task under the model fitted to all other tasks."""
    left = []
    for task in sorted(set(points.tasks)):
        inside = np.array([t == task for t in points.tasks])
        predicted = model(points.where(~inside))(points.where(inside))
        left.append(predicted - np.log(points.efficiencies[inside]))
    return float(np.sqrt(np.mean(np.concatenate(left) ** 2)))

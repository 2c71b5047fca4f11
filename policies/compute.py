"""What compressing costs: interpolation of the seconds that agents measured."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gradpilot.protos.messages import ComputeSample, Setting

Floats = NDArray[np.float64]
FamilyKey = tuple[str, tuple[Setting, ...]]

LAST = 5
"""Of several samples for one (family, ratio, elements) the median of this many newest counts; of an
even number the lower one, so that of two no single odd one decides."""

TINY_SECONDS = 1e-9


class ComputeModel:
    """Seconds of every family as a function of ratio and elements.

    Linear in the logarithms between measured points, so monotone there; forced to grow with the
    number of elements. Above the largest bucket measured it grows in proportion or along the last
    two points, whichever is more; below the smallest it never falls faster than in proportion.

    Args:
        samples: Measurements, oldest first.
    """

    def __init__(self, samples: Iterable[ComputeSample]) -> None:
        points: dict[FamilyKey, dict[float, dict[int, list[tuple[float, float]]]]] = {}
        for sample in samples:
            pair = (sample.compress_seconds, sample.decompress_seconds)
            known = np.isfinite([sample.ratio, *pair]).all()
            if not known or min(pair) < 0 or sample.ratio <= 0 or sample.elements < 1:
                continue
            curve = points.setdefault((sample.compressor, sample.settings), {})
            curve.setdefault(sample.ratio, {}).setdefault(sample.elements, []).append(pair)
        self._curves: dict[FamilyKey, list[tuple[float, Floats, Floats]]] = {}
        for family, ratios in points.items():
            self._curves[family] = [
                (ratio, *_curve(sizes)) for ratio, sizes in sorted(ratios.items())
            ]

    def __contains__(self, family: object) -> bool:
        return family in self._curves

    def seconds(self, family: FamilyKey, ratios: Floats, elements: Floats) -> tuple[Floats, Floats]:
        """Return compress and decompress seconds, each of shape (ratios, elements).

        NaN where the family was never measured.
        """
        curves = self._curves.get(family)
        if curves is None:
            unknown = np.full((len(ratios), len(elements)), np.nan)
            return unknown, unknown.copy()
        knots = np.log([ratio for ratio, _, _ in curves])
        # (measured ratios, 2, elements), as logarithms
        logs = np.log(np.stack([_at(sizes, pairs, elements) for _, sizes, pairs in curves]))
        low, high, share = bracket(knots, np.log(ratios))
        mixed = np.exp(logs[low] + share[:, None, None] * (logs[high] - logs[low]))
        mixed[mixed <= 2 * TINY_SECONDS] = 0.0
        return mixed[:, 0], mixed[:, 1]


def bracket(knots: Floats, at: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """Return the two knots around each point and the share of the upper one; clamped outside."""
    if len(knots) == 1:
        zero = np.zeros(len(at), dtype=np.intp)
        return zero, zero, np.zeros(len(at))
    low = np.clip(np.searchsorted(knots, at, side="right") - 1, 0, len(knots) - 2)
    width = knots[low + 1] - knots[low]
    # Two ratios that differ may have one logarithm.
    share = np.divide(at - knots[low], width, out=np.zeros(len(at)), where=width > 0)
    share = np.clip(share, 0.0, 1.0)
    return low, low + 1, share


def _curve(sizes: dict[int, list[tuple[float, float]]]) -> tuple[Floats, Floats]:
    """Return elements and (2, elements) seconds of one ratio, non-decreasing."""
    elements = np.array(sorted(sizes), dtype=np.float64)
    medians = np.array([_middle(sizes[size]) for size in sorted(sizes)]).T
    return elements, np.maximum.accumulate(np.maximum(medians, TINY_SECONDS), axis=1)


def _middle(pairs: list[tuple[float, float]]) -> Floats:
    """Return the medians of the newest pairs; no time at all counts only if it is never another."""
    columns = []
    for column in zip(*pairs, strict=True):
        known = sorted([value for value in column if value > 0][-LAST:]) or [0.0]
        columns.append(known[(len(known) - 1) // 2])
    return np.array(columns)


def _at(sizes: Floats, pairs: Floats, elements: Floats) -> Floats:
    """Return (2, elements) seconds at other numbers of elements."""
    logs = np.log(elements)
    inside = np.stack([np.exp(np.interp(logs, np.log(sizes), np.log(row))) for row in pairs])
    above = elements / sizes[-1]
    below = elements / sizes[0]
    first, last = pairs[:, :1], pairs[:, -1:]
    if len(sizes) > 1:
        slope_last = (pairs[:, -1:] - pairs[:, -2:-1]) / (sizes[-1] - sizes[-2])
        slope_first = (pairs[:, 1:2] - pairs[:, :1]) / (sizes[1] - sizes[0])
        beyond = np.maximum(last + slope_last * (elements - sizes[-1]), last)
        before = np.maximum(first + slope_first * (elements - sizes[0]), first * below)
    else:
        beyond, before = last * above, first * below
    inside = np.where(above > 1, beyond, inside)
    return np.maximum(np.where(below < 1, before, inside), TINY_SECONDS)

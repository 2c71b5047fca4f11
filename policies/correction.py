"""How far predictions of gain are off, from what was measured where an option was in use.

Two sources. What is measured under the plan in force corrects its family, bucket by bucket. What
was learned about options that are not in use now comes from the history; it fades, since gradients
change, and then the bare prediction stands again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.compute import FamilyKey, bracket
from gradpilot.policies.history import GainRecord, ratio_bucket

Floats = NDArray[np.float64]

HALF_LIFE_STEPS = 200
"""Steps out of use after which half of a remembered correction, as a logarithm, is left."""

FADED_STEPS = 5 * HALF_LIFE_STEPS
"""Out of use for longer, nothing of it counts."""

CAUTION = 0.05
"""A gain that fell below the floor is remembered as smaller by this share, so that an option at the
floor does not come and go."""

REMEMBERED = (0.2, 5.0)
"""Bounds of a remembered factor."""


class Live(NamedTuple):
    """A family in use: the ratios in use, and per bucket the logarithm of measured / predicted."""

    ratios: tuple[float, ...]
    logs: Floats


class Bounds:
    """What gains cannot exceed, since they fell below the floor where the option was in use.

    For as long as that is remembered it bounds a family's gain at the same and at smaller ratios,
    whatever is predicted: else the same prediction would bring the same plan again and again. To
    larger ratios the bound grows in proportion, as energy curves are concave.

    Args:
        live: Families in use; at a ratio in use what is measured now counts.
        records: What is remembered.
        step: Present step.
    """

    def __init__(
        self, live: Mapping[FamilyKey, Live], records: Sequence[GainRecord], step: int
    ) -> None:
        self._known: dict[FamilyKey, list[tuple[float, float]]] = {}
        for record in records:
            key = (record.compressor, record.settings)
            using = live[key].ratios if key in live else ()
            if record.missed < 0 or freshness(record, step) <= 0 or record.ratio in using:
                continue
            most = record.missed / (1 + CAUTION)
            self._known.setdefault(key, []).append((record.ratio, most))

    def most(self, key: FamilyKey, ratios: Floats) -> Floats | None:
        """Return the bounds of shape (ratios,); None if there are none for the family."""
        if key not in self._known:
            return None
        bounds = [gain * np.maximum(ratios / ratio, 1.0) for ratio, gain in self._known[key]]
        least: Floats = np.min(bounds, axis=0)
        return least


class Corrections:
    """Factors on predicted gains as a function of family and ratio.

    Between ratios that are known the logarithm of the factor is linear in the logarithm of the
    ratio; outside, the nearest one holds. Where an option is in use, what is measured there counts
    instead of what is remembered of ratios near it.

    Args:
        live: Families in use.
        records: What is remembered.
        step: Present step.
        buckets: Number of buckets B.
    """

    def __init__(
        self,
        live: Mapping[FamilyKey, Live],
        records: Sequence[GainRecord],
        step: int,
        buckets: int,
    ) -> None:
        points: dict[FamilyKey, dict[float, Floats]] = {}
        for key, (ratios, logs) in live.items():
            points[key] = dict.fromkeys(ratios, logs)
        for record in records:
            if not (math.isfinite(record.factor) and 0 < record.ratio <= 1):
                continue
            key = (record.compressor, record.settings)
            using = live.get(key)
            if using and ratio_bucket(record.ratio) in map(ratio_bucket, using.ratios):
                continue
            left = freshness(record, step)
            if left > 0:
                rest = using.logs if using else np.zeros(buckets)
                log = np.log(np.clip(record.factor, *REMEMBERED))
                points.setdefault(key, {})[record.ratio] = left * log + (1 - left) * rest
        self._knots = {
            key: (np.log(sorted(known)), np.stack([known[ratio] for ratio in sorted(known)]))
            for key, known in points.items()
            if known
        }

    def factors(self, key: FamilyKey, ratios: Floats) -> Floats | None:
        """Return factors of shape (ratios, buckets); None if nothing is known of the family."""
        if key not in self._knots:
            return None
        knots, logs = self._knots[key]
        low, high, share = bracket(knots, np.log(ratios))
        factors: Floats = np.exp(logs[low] + share[:, None] * (logs[high] - logs[low]))
        return factors


def freshness(record: GainRecord, step: int) -> float:
    """Return how much of a record counts, 1 while in use and halved every HALF_LIFE_STEPS."""
    age = max(step - record.step, 0)
    return 0.5 ** (age / HALF_LIFE_STEPS) if age <= FADED_STEPS else 0.0

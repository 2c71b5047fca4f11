"""When a run is stable enough for contributions to be skipped: by a rule, not by a fixed count.

Published runs of SkipReduce skip from the first step, or after so many iterations as a script says.
Early gradients change fast, and what is left out of them is missed most. Here nothing is skipped
until the gradient's norm and its signal-to-noise ratio, looked at once a decision, have stayed
within a tenth of their moving averages a few times in a row. A change by half, as at a step of the
learning rate (the bound of Accordion for a critical regime), starts it over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STABLE_CHANGE = 0.1
"""Relative change that counts as none."""

CRITICAL_CHANGE = 0.5
"""Relative change after which a run is cold again."""

STABLE_LOOKS = 3
"""Looks in a row without change that make a run warm."""

WEIGHT = 0.5
"""Weight of a new value in the moving averages."""


@dataclass(frozen=True, slots=True)
class Warmth:
    """How far the warm-up is.

    Attributes:
        averages: Moving averages of what is looked at.
        stable: Looks in a row without change.
        looks: All looks.
        warm: Whether contributions may be skipped.
        since_step: Step at which that was decided last.
    """

    averages: tuple[float, ...] = ()
    stable: int = 0
    looks: int = 0
    warm: bool = False
    since_step: int = 0


def next_warmth(before: Warmth, values: Sequence[float], step: int) -> Warmth:
    """Return how far the warm-up is after another look.

    Args:
        before: After the look before.
        values: What must be stable, such as norm and signal-to-noise ratio; the same number at
            every look. Nothing is learned from a look with an unknown value (negative, NaN).
        step: Present step, for the record.
    """
    if not values or not all(0.0 <= value < math.inf for value in values):
        return before
    if len(before.averages) != len(values):
        return Warmth(tuple(values), 0, before.looks + 1, False, step)
    pairs = list(zip(before.averages, values, strict=True))
    change = max(abs(new - old) / max(old, new) if max(old, new) > 0 else 0.0 for old, new in pairs)
    averages = tuple(old + WEIGHT * (new - old) for old, new in pairs)
    stable = before.stable + 1 if change < STABLE_CHANGE else 0
    warm = (before.warm or stable >= STABLE_LOOKS) and change < CRITICAL_CHANGE
    since = before.since_step if warm == before.warm else step
    return Warmth(averages, stable, before.looks + 1, warm, since)

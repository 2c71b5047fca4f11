"""When a run is stable enough for strong compression and skips: by a rule, not by a fixed count.

Published runs of SkipReduce skip from the first step, or after so many iterations as a script says.
Early gradients change fast, and what is left out of them is missed most. Here nothing is skipped
until the gradient's norm and its signal-to-noise ratio, looked at once a decision, have stayed
within a tenth of their moving averages a few times in a row. A change by half (the bound of
Accordion for a critical regime) starts it over, and so does a shock told from outside, such as a
step of the learning rate. A change that is seen twice, or such a shock, makes the phase critical.

Until then the floor of gain is tightened: strong compression early in training costs most. Noisy
gradients never stay within a tenth, so for the floor a row without a change by half is enough. The
floor then comes down in a few looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

STABLE_CHANGE = 0.1
"""Relative change that counts as none."""

CRITICAL_CHANGE = 0.5
"""Relative change after which a run is cold again."""

STABLE_LOOKS = 3
"""Looks in a row without change that make a run warm."""

CALM_LOOKS = 3
"""Looks in a row without a critical change after which the floor of gain comes down anyway.

No more: plans are judged by efficiencies that were measured with compression from the first step
on, so what early compression costs is in them.
"""

RAMP_LOOKS = 2
"""Looks in which it comes down."""

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
        calm: Looks in a row without a critical change.
        ramp: Looks until the floor of gain is all the way down, once it comes down.
        critical: Why a run that was settled is so no more; empty if it is, or never was.
        odd: Looks in a row with a change by half: the first makes the run cold, the second makes
            the phase a critical one.
        shaken: Whether the run was settled when that began.
    """

    averages: tuple[float, ...] = ()
    stable: int = 0
    looks: int = 0
    warm: bool = False
    since_step: int = 0
    calm: int = 0
    ramp: int = 0
    critical: str = ""
    odd: int = 0
    shaken: bool = False

    @property
    def settled(self) -> bool:
        """Return whether the floor of gain may come down."""
        return self.warm or self.calm >= CALM_LOOKS

    def floor(self, least: float, careful: float) -> float:
        """Return the floor of gain.

        Args:
            least: The operator's floor, which holds in the end.
            careful: The floor for a run that is not settled.
        """
        strict = max(least, careful)
        share = min(self.ramp / RAMP_LOOKS, 1.0) if self.settled else 1.0
        return strict if share == 1.0 else least + share * (strict - least)


def next_warmth(
    before: Warmth,
    values: Sequence[float],
    step: int,
    *,
    shock: str = "",
    rebase: bool = False,
) -> Warmth:
    """Return how far the warm-up is after another look.

    Args:
        before: After the look before.
        values: What must be stable, such as norm and signal-to-noise ratio; the same number at
            every look. Nothing is learned from a look with an unknown value (negative, NaN).
        step: Present step, for the record.
        shock: What else happened that makes the phase a critical one; empty if nothing.
        rebase: Whether the values differ from those before for a reason of our own, as a residual
            is added to the gradient after a switch; they are then taken as the new averages.
    """
    known = bool(values) and all(0.0 <= value < math.inf for value in values)
    if shock:
        averages = tuple(values) if known else before.averages
        return _cold(before, averages, step, shock)
    if not known:
        return before
    if not before.averages:
        return Warmth(tuple(values), 0, before.looks + 1, False, step)
    if rebase or len(before.averages) != len(values):
        return replace(before, averages=tuple(values), stable=0)
    pairs = list(zip(before.averages, values, strict=True))
    change = max(abs(new - old) / max(old, new) if max(old, new) > 0 else 0.0 for old, new in pairs)
    averages = tuple(old + WEIGHT * (new - old) for old, new in pairs)
    if change >= CRITICAL_CHANGE:
        shaken = before.settled if before.odd == 0 else before.shaken
        if before.odd == 0:  # one spike is no new phase; the averages stay out of it
            cold = replace(before, stable=0, looks=before.looks + 1, warm=False)
            since = step if before.warm else before.since_step
            return replace(cold, since_step=since, odd=1, shaken=shaken)
        why = f"the gradient's norm or noise changed by {100 * change:.0f} %"
        return _cold(replace(before, shaken=shaken), tuple(values), step, why)
    stable = before.stable + 1 if change < STABLE_CHANGE else 0
    after = replace(
        before,
        averages=averages,
        stable=stable,
        looks=before.looks + 1,
        warm=before.warm or stable >= STABLE_LOOKS,
        calm=min(before.calm + 1, CALM_LOOKS),
        odd=0,
        shaken=False,
        ramp=max(before.ramp - 1, 0),
    )
    if after.warm != before.warm:
        after = replace(after, since_step=step)
    if after.settled and not before.settled:
        after = replace(after, ramp=RAMP_LOOKS - 1, critical="")
    return after


def _cold(before: Warmth, averages: tuple[float, ...], step: int, why: str) -> Warmth:
    critical = why if before.settled or before.shaken or before.critical else ""
    since = step if before.warm else before.since_step
    return Warmth(averages, 0, before.looks + 1, False, since, critical=critical)

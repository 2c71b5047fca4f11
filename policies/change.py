"""Since when the link is as it is now: a cumulative-sum test on standardised residuals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NOISE = 0.10
"""Relative noise that counts as normal."""

DRIFT = 1.0
ALARM = 14.0
CLIP = 3.0
"""In standard deviations. A shift beyond CLIP alarms after ALARM / (CLIP - DRIFT) = 7 operations;
with a fifth of outliers upwards a false alarm has about 0.2 % a decision. An older stretch, which
may begin anywhere, must reach twice the alarm."""

LEAST = 4
"""Fewest newest operations that count as a state of their own."""


def first_of_present(
    seconds: Floats, predicted: Floats, uncertain: Floats, kind: NDArray[np.intp]
) -> int:
    """Return the first operation that belongs to the present state of the link.

    Two questions with one sum, taken from the newest operation back. Do the newest deviate from the
    prediction? Then they alone count, back to where deviating began (the maximum of the sum before
    it falls again). Or do the newest agree and older ones deviate? Then the older ones are from
    before an earlier change.

    Args:
        seconds: Measured, oldest first, (n,).
        predicted: By the previous estimate, positive, (n,).
        uncertain: Variance of the prediction, (n,); ignored where it is not finite.
        kind: Number of the kind of operation; equal kinds should take equal times, (n,).

    Returns:
        0 if nothing changed.
    """
    if not np.isfinite(uncertain).all():
        uncertain = np.zeros(len(predicted))
    spread = np.sqrt((_noise(seconds, kind) * predicted) ** 2 + np.minimum(uncertain, predicted**2))
    z = np.clip((seconds - predicted) / spread, -CLIP, CLIP)[::-1]
    for side in (z, -z):
        total = np.cumsum(side - DRIFT)
        fallen = np.maximum.accumulate(np.maximum(total, 0.0)) - total >= ALARM
        # What deviates behind newest operations that agree is older, and for the second question.
        over = fallen | (total <= -LEAST * DRIFT)
        upto = int(over.argmax()) if over.any() else len(total)
        if upto and total[:upto].max() >= ALARM:
            return len(z) - 1 - int(total[:upto].argmax())
    return max(_before(z), _before(-z))


def _before(z: Floats) -> int:
    """Return where a deviating stretch behind agreeing newest operations ends; 0 if none."""
    run, start = 0.0, 0
    for i, step in enumerate(z - DRIFT):
        if run <= 0:
            run, start = 0.0, i
        run += step
        if run >= 2 * ALARM and start >= LEAST:
            return len(z) - start
    return 0


def _noise(seconds: Floats, kind: NDArray[np.intp]) -> float:
    """Return the relative noise between successive operations of one kind.

    Differences of neighbours do not see a step of the level.
    """
    logs = np.log(seconds)
    jumps = [np.diff(logs[kind == one]) for one in np.unique(kind)]
    steps = np.abs(np.concatenate(jumps)) if jumps else np.zeros(0)
    if len(steps) < 8:
        return NOISE
    return float(np.clip(1.4826 * np.median(steps) / np.sqrt(2), NOISE, 3 * NOISE))

"""Phases of training in which compression must be mild, beside what ``warm_up`` tells.

A step of the learning rate and a gain that moved for good both mean that gradients are not what
they were; the rules for norm and noise are in ``warm_up``, which takes these as shocks.
"""

from __future__ import annotations

import math
from dataclasses import replace

from gradpilot.policies.base import Inputs
from gradpilot.policies.gain import usable_gain
from gradpilot.policies.watches import Regime
from gradpilot.warm_up import WEIGHT, Warmth

LR_STEP = 1.5
"""Factor of the learning rate between two looks that is a step: schedules that decay smoothly stay
below it."""

GAIN_CHANGE = 0.1
"""Relative change of the gain that is no noise if it stays (GraVAC uses the same bound)."""

APART_LOOKS = 2
"""Looks in a row for which it has to stay."""

LOSSES = 12
"""Losses remembered."""


def next_regime(inputs: Inputs, *, rebase: bool) -> tuple[Regime, str]:
    """Return what is known after another look, and what makes the phase critical (else empty).

    Args:
        inputs: What is known.
        rebase: Whether the plan is so young that its gain and loss are no measure yet.
    """
    before = inputs.history.regime
    after, shocks = before, []
    if 0 < inputs.lr < math.inf:
        if 0 < before.lr < math.inf and max(inputs.lr, before.lr) >= LR_STEP * min(
            inputs.lr, before.lr
        ):
            shocks.append(f"the learning rate went from {before.lr:.3g} to {inputs.lr:.3g}")
        after = replace(after, lr=inputs.lr)
    gain = total_gain(inputs)
    if rebase or before.gain <= 0:
        after = replace(after, gain=gain, apart=0)
    elif gain > 0:
        change = abs(gain - before.gain) / before.gain
        side = 1 if gain > before.gain else -1
        apart = side * (1 + abs(before.apart) * (before.apart * side > 0))
        apart = apart if change >= GAIN_CHANGE else 0
        after = replace(after, gain=before.gain + WEIGHT * (gain - before.gain), apart=apart)
        if abs(apart) >= APART_LOOKS:
            shocks.append(f"the gain went from {before.gain:.2f} to {gain:.2f}")
            after = replace(after, gain=gain, apart=0)
    return replace(after, losses=_losses(inputs, rebase=rebase)), " and ".join(shocks)


def total_gain(inputs: Inputs) -> float:
    """Return the measured gain over all buckets, weighted by energy; -1 if unknown."""
    known = [s for s in inputs.buckets if usable_gain(s.gain) and 0 <= s.gradient_sq < math.inf]
    weight = sum(s.gradient_sq for s in known)
    if not known or not 0 < weight < math.inf:
        return -1.0
    return sum(s.gain * s.gradient_sq for s in known) / weight


def tell(warmth: Warmth, floor: float) -> list[str]:
    """Return for people why the floor of gain is tightened; nothing if it is not."""
    if warmth.critical:
        return [f"critical phase, gain floor {floor:.2g}: {warmth.critical}"]
    if not warmth.settled:
        return [f"warm-up, gain floor {floor:.2g} until gradient norm and noise are stable"]
    return [f"warm-up is over, gain floor {floor:.2g} on its way down"] if warmth.ramp else []


def _losses(inputs: Inputs, *, rebase: bool) -> tuple[float, ...]:
    """Return the last losses that differ; a look without a new one brings none."""
    known = () if rebase else inputs.history.regime.losses
    loss = inputs.loss
    if math.isnan(loss) or (known and loss == known[-1] and loss != math.inf):
        return known
    return (*known, loss)[-LOSSES:]

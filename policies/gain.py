"""What survives compression, and what that is worth.

Gain is ``||sent||^2 / ||corrected||^2``. It follows from the cumulative energy of the live
gradient, one curve for all ratios. Efficiency, the progress of a step relative to a dense step, is
gain to a power that belongs to the family: gain alone does not order methods across families.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.base import BucketState
from gradpilot.policies.compute import FamilyKey, bracket
from gradpilot.policies.correction import Bounds, Corrections, Live
from gradpilot.policies.history import GainRecord
from gradpilot.policies.protection import bare_sq
from gradpilot.policies.skipping import contributions
from gradpilot.protos.messages import ENERGY_RATIOS, Bucket, Family, Option

Floats = NDArray[np.float64]

SKIP_EXPONENTS = {"skip": 0.70, "drop": 1.33, "shrink": 1.33}
"""Efficiency of hearing a share of the ranks = share ** this, by divisor, at the learning rate that
suits dense training (``bench/results/efficiency.json``: a CNN on images and a model of text, N = 4
with 1 to 3 steps skipped, five seeds; twice the standard errors are 0.11 and 0.14). The divisor N
shrinks the step with what is left out; N - S does not, which this rate cannot bear so well. At a
rate matched to each, both need 0.80. ``shrink`` was not measured and gets the worse one."""

BARE_POWER = 3.0
FILLED_SHARE = 0.5
"""Under error feedback the residual holds what was not sent again and again, so the largest parts
of gradient + residual hold less than those of a bare gradient: about their share to this power. The
more of it is residual already, the better the curve predicts; from this share of the squared norm
on it is taken as it is. Recorded trainings of a CNN and a transformer (``bench.record_gradients``):
powers of 2.5 to 4 for a bare gradient, 2.0 to 2.4 where a sixth is residual, 1.3 to 2.1 where it is
a third, 0.9 to 1.3 from a half on; gains of 0.1 to 0.8."""

SMALLEST = 1e-9
CORRECTION = (0.1, 10.0)
"""Bounds on how far a measured gain may move the model."""


def gaussian_gain(ratio: float) -> float:
    """Return the gain of top-k on independent normal elements."""
    if ratio >= 1:
        return 1.0
    if ratio <= 0:
        return 0.0
    normal = NormalDist()
    # A subnormal ratio overflows the quantile; nothing that small is ever kept.
    z = -normal.inv_cdf(max(ratio, 1e-12) / 2)
    return min(1.0, ratio + 2 * z * normal.pdf(z))


def laplace_gain(ratio: float) -> float:
    """Return the gain of top-k on independent Laplace elements: c (1 - ln c + ln(c)^2 / 2)."""
    if ratio >= 1:
        return 1.0
    if ratio <= 0:
        return 0.0
    log = float(np.log(ratio))
    return min(1.0, ratio * (1 - log + log**2 / 2))


GAUSSIAN_CURVE: tuple[float, ...] = tuple(gaussian_gain(ratio) for ratio in ENERGY_RATIOS)
"""Used where no curve is known: real gradients keep more, so it errs on the careful side."""


class GainModel:
    """Gain per bucket and ratio for every family.

    Args:
        buckets: Buckets of the layout.
        states: What is known of them, in the same order.
        current: Option per bucket that the measured gains belong to; empty if unknown. A bucket
            whose option skips is not corrected: its gain holds the skipping too.
        families: Families by which measured gains are compared with predicted ones.
        records: What is remembered of options that were in use.
        step: Present step, from which the age of records is counted.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        states: Sequence[BucketState],
        current: Sequence[Option] = (),
        families: Sequence[Family] = (),
        records: Sequence[GainRecord] = (),
        step: int = 0,
    ) -> None:
        self.weights = _weights(buckets, states)
        self._curves = np.log(_curves(states))
        self._powers = _powers(states)
        self._knots = np.log(ENERGY_RATIOS)
        live = self._measured(states, current, families)
        self._corrections = Corrections(live, records, step, len(self.weights))
        self._bounds = Bounds(live, records, step)

    def gain(self, family: Family, ratios: Floats) -> Floats:
        """Return gains of shape (ratios, buckets), in (0, 1].

        They grow with the ratio where all of them are corrected by one factor.
        """
        gains = self.predicted(family, ratios)
        factors = self._corrections.factors((family.compressor, family.settings), ratios)
        if factors is not None:
            gains = gains * factors
        most = self._bounds.most((family.compressor, family.settings), ratios)
        if most is not None:
            total = np.clip(gains, SMALLEST, 1.0) @ self.weights
            gains = gains * np.minimum(most / total, 1.0)[:, None]
        return np.clip(gains, SMALLEST, 1.0)

    def predicted(self, family: Family, ratios: Floats) -> Floats:
        """Return what the family's model alone says, (ratios, buckets), growing with the ratio."""
        shape = (len(ratios), len(self.weights))
        if family.gain_model == "energy":
            gains = family.gain_factor * self._energy(ratios)
        elif family.gain_model == "ratio":
            gains = np.broadcast_to(ratios[:, None], shape)
        else:
            gains = np.full(shape, family.gain_factor)
        return np.clip(gains, SMALLEST, 1.0)

    def _measured(
        self, states: Sequence[BucketState], current: Sequence[Option], families: Sequence[Family]
    ) -> dict[FamilyKey, Live]:
        """Compare measured gains of the options in use with predicted ones."""
        known = {(family.compressor, family.settings): family for family in families}
        found: dict[FamilyKey, Live] = {}
        for b, (state, option) in enumerate(zip(states, current, strict=False)):
            family = known.get(option.family)
            if family is None or option.skip or not usable_gain(state.gain):
                continue
            if not 0 < option.ratio <= 1:
                continue
            predicted = self.predicted(family, np.array([option.ratio]))[0, b]
            factor = np.clip(state.gain / max(predicted, SMALLEST), *CORRECTION)
            ratios, logs = found.get(option.family, Live((), np.zeros(len(self.weights))))
            logs[b] = np.log(factor)
            found[option.family] = Live(tuple(dict.fromkeys((*ratios, option.ratio))), logs)
        return found

    def _energy(self, ratios: Floats) -> Floats:
        """Interpolate in log energy and log ratio; below the first knot along the first slope."""
        at = np.log(ratios)
        low, high, share = bracket(self._knots, at)
        logs = self._curves[low] + share[:, None] * (self._curves[high] - self._curves[low])
        slope = (self._curves[1] - self._curves[0]) / (self._knots[1] - self._knots[0])
        logs = logs + np.minimum(at - self._knots[0], 0.0)[:, None] * np.clip(slope, 0.0, 1.0)
        energies: Floats = np.exp(logs * self._powers)
        return energies


def usable_gain(gain: float) -> bool:
    """Return whether a measured gain is one; sums of rounded squares may end just above 1."""
    return 0 < gain <= 1.000001


def efficiency(gain: Floats, exponent: float) -> Floats:
    """Return progress of one step relative to a dense step, (0, 1]."""
    bounded: Floats = np.clip(gain, SMALLEST, 1.0) ** max(exponent, 0.0)
    return np.clip(bounded, SMALLEST, 1.0)


def skip_efficiency(share: float, divisor: str) -> float:
    """Return progress of a step that hears this share of the ranks; see ``SKIP_EXPONENTS``."""
    return float(share ** SKIP_EXPONENTS[divisor])


def skip_gain(collective: str, world_size: int, skip: int) -> float:
    """Return the share of a gradient that is heard with ``skip`` steps of a collective left out."""
    return contributions(collective, world_size, skip) / world_size if world_size > 0 else 1.0


def _weights(buckets: Sequence[Bucket], states: Sequence[BucketState]) -> Floats:
    """Return each bucket's share of ||gradient||^2; where unknown, by elements at mean density.

    Without the residuals: those are large where little is sent, which would make weights, and with
    them the gain of every other option, depend on the option in use.
    """
    elements = np.array([max(b.elements, 1) for b in buckets], dtype=np.float64)
    squares = np.array([bare_sq(s) for s in states], dtype=np.float64)
    known = np.isfinite(squares) & (squares >= 0)
    weights: Floats = elements
    if known.any() and squares[known].max() > 0:
        squares = squares / squares[known].max()
        density = squares[known].sum() / elements[known].sum()
        weights = np.where(known, squares, elements * density)
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def _powers(states: Sequence[BucketState]) -> Floats:
    """Return the power of each bucket's energy that its gain will be; see ``BARE_POWER``."""
    powers = np.ones(len(states))
    for b, state in enumerate(states):
        residual, whole = state.residual_sq, state.gradient_sq
        if 0 <= residual < np.inf and 0 < whole < np.inf:
            missing = 1.0 - min(residual / (FILLED_SHARE * whole), 1.0)
            powers[b] = 1.0 + (BARE_POWER - 1.0) * missing
    return powers


def _curves(states: Sequence[BucketState]) -> Floats:
    """Return energy curves of shape (knots, buckets), made monotone; gaps get the mean curve."""
    curves = np.full((len(ENERGY_RATIOS), len(states)), np.nan)
    for b, state in enumerate(states):
        if len(state.energy) == len(ENERGY_RATIOS):
            curve = np.array(state.energy, dtype=np.float64)
            if np.isfinite(curve).all() and curve.min() >= 0 and curve.max() > 0:
                curves[:, b] = curve
    known = np.isfinite(curves).all(axis=0)
    stand_in = curves[:, known].mean(axis=1) if known.any() else np.array(GAUSSIAN_CURVE)
    curves[:, ~known] = stand_in[:, None]
    curves = np.maximum.accumulate(np.clip(curves, SMALLEST, 1.0), axis=0)
    curves[-1] = 1.0
    return curves

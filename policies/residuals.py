"""The residual as a warning: what compression holds back must not outgrow the gradient.

What is compared is ||residual||^2 with ||gradient||^2 as it was when everything was sent last:
under compression the measured gradient has the residual in it. Gradients may have grown since, in
the first steps of a training by an order of magnitude, so what a step sends counts instead if it is
more: as long as steps send much beside what waits, nothing runs away.

Where the default limit of 30 comes from: in the sweep of ``bench.efficiency`` a ratio of 54 was
passed by 78 % of the trainings that diverged and by 3.8 % of those that went well
(``bench/results/efficiency.json``). 30 is a careful prior below that; what a step sends is no part
of that measure, and keeps the alarm quiet where a training goes well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from gradpilot.policies.base import BucketState, Inputs
from gradpilot.policies.dwell import whole
from gradpilot.policies.watches import ResidualTrend
from gradpilot.protos.messages import Option
from gradpilot.warm_up import WEIGHT

CLEAN = 0.01
"""Share of ||gradient||^2 below which a residual does not show in it."""

GROWTH = 1.5
"""Factor over the moving average that is growth."""

GROWING_LOOKS = 4
"""Measurements in a row with growth that are no build-up after a switch any more."""

MOST_INSIDE = 4.0
"""Residual over residual and gradient together (squared norms); 0.33 to 0.993 were measured."""

WEIGHTY = 0.05
"""Share of the gradient's energy from which on a bucket is looked at by itself."""


class Finding(NamedTuple):
    """What is known after a look, and why the plan must go (empty if it need not)."""

    trend: ResidualTrend
    alarm: str = ""


def watch(inputs: Inputs, present: Sequence[Option], *, rebase: bool) -> Finding:
    """Look at the residuals.

    Args:
        inputs: What is known.
        present: Distinct options in use; empty if unknown.
        rebase: Whether the plan is so young that its residual is still building up.
    """
    before = inputs.history.residuals
    if present and whole(present):
        known = _reference(before, inputs.buckets).gradient_sq
        return Finding(ResidualTrend(gradient_sq=known))
    squares = _squares(before, inputs)
    if squares is None:
        return Finding(before)
    kept, sent = (sum(column) for column in zip(*squares, strict=True))
    ratio = kept / sent
    limit = inputs.settings.residual_limit
    worst = max((r / g for r, g in squares if g >= WEIGHTY * sent), default=0.0)
    if ratio == before.last:
        return Finding(before)
    if before.ratio < 0 or rebase:
        trend = replace(before, ratio=ratio, last=ratio, growing=0)
    else:
        grew = ratio > GROWTH * before.ratio and ratio > 1
        average = before.ratio + WEIGHT * (ratio - before.ratio)
        growing = before.growing + 1 if grew else 0
        trend = replace(before, ratio=average, last=ratio, growing=growing)
    over = max(ratio, worst) > limit
    trend = replace(trend, over=before.over + 1 if over else 0)
    if over and (trend.over >= 2 or _consistent(inputs.buckets)):
        where = "" if ratio > limit else " in a bucket"
        return Finding(
            trend,
            f"the residual is {max(ratio, worst):.3g} times the gradient{where} (squared norms),"
            f" more than {limit:g}",
        )
    if trend.growing >= GROWING_LOOKS:
        return Finding(
            trend,
            f"the residual grew at {trend.growing} measurements in a row, to {ratio:.3g} times the"
            " gradient (squared norms)",
        )
    return Finding(trend)


def _consistent(buckets: Sequence[BucketState]) -> bool:
    """Return whether no residual exceeds by much what was measured with it inside.

    Then one measurement is enough: a run that diverges has no time to wait for another.
    """
    return all(b.residual_sq <= MOST_INSIDE * b.gradient_sq for b in buckets)


def _reference(before: ResidualTrend, buckets: Sequence[BucketState]) -> ResidualTrend:
    """Take the gradients of a plan that sends everything, once no residual is in them."""
    clean = all(
        0 < b.gradient_sq < math.inf and b.residual_sq <= CLEAN * b.gradient_sq for b in buckets
    )
    return replace(before, gradient_sq=tuple(b.gradient_sq for b in buckets)) if clean else before


def _squares(before: ResidualTrend, inputs: Inputs) -> list[tuple[float, float]] | None:
    """Return (||residual||^2, ||gradient||^2) of the buckets that have both; None if none has.

    Without a reference the measured gradient, residual included, stands in: then the ratio errs on
    the low side, and only growth tells.
    """
    buckets = inputs.buckets
    fits = inputs.history.layout == inputs.layout.digest
    known = before.gradient_sq if fits and len(before.gradient_sq) == len(buckets) else ()
    gradients = tuple(
        max(g, b.gain * b.gradient_sq) if b.gain > 0 else g
        for g, b in zip(known or (b.gradient_sq for b in buckets), buckets, strict=True)
    )
    pairs = [
        (b.residual_sq, g)
        for b, g in zip(buckets, gradients, strict=True)
        if 0 <= b.residual_sq < math.inf and 0 < g < math.inf
    ]
    return pairs or None

"""How well step times are predicted, and the interval that follows for the next prediction.

A decision leaves the step time that it predicts for the plan in force after it; the next look
compares that with the measured one. So every error is one of a prediction made before its
measurement. Those of plans that were never in use when predicted are kept apart: the plan in use
is predicted from its own measurements, and much better.

The interval is the one of split conformal prediction: of n earlier ratios and the next one every
order is equally likely if they are exchangeable, so the next lies between the k-th smallest and
the k-th greatest with probability (n + 1 - 2k) / (n + 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gradpilot.policies.base import Inputs
from gradpilot.policies.history import History, StepError, StepForecast
from gradpilot.policies.trial import alike, expand
from gradpilot.protos.explanations import Interval
from gradpilot.protos.messages import Option

SHARE = 0.9
"""Share of looks that an interval should hold."""

ENOUGH = 19
"""Looks from which on an interval holds ``SHARE``; fewer give all that they saw, a lower share."""

LEAST = 3
"""Fewer looks give no interval."""

MOST_ERRORS = 48
"""Errors kept of plans that were in use when predicted, and as many of those that were not."""

MIXED = "mixed"
"""Stands for the compressor of a plan with several."""


def next_errors(inputs: Inputs, current: Sequence[Option], *, doubt: bool) -> History:
    """Return the history with the forecast compared, if there is one and a measurement for it.

    Nothing is compared before the plan has settled, ``trial_steps`` after the switch.

    Args:
        inputs: What is known.
        current: Option per bucket in force; empty if there is no plan.
        doubt: Whether the numbers of this look are too odd to act on.
    """
    history = inputs.history
    forecast = history.forecast
    if forecast is None or doubt:
        return history
    same = history.layout == inputs.layout.digest and bool(current)
    if not same or expand(forecast.options, inputs) != tuple(current):
        return replace(history, forecast=None)  # turned down by a rank, or overruled
    if inputs.step <= forecast.step or inputs.steps_since_switch < inputs.settings.trial_steps:
        return history
    ratio = inputs.step_seconds / forecast.seconds if forecast.seconds > 0 else math.nan
    if not 0 < ratio < math.inf:
        return replace(history, forecast=None)
    found = StepError(
        name(current), compressor(current), ratio, untried=forecast.untried, step=inputs.step
    )
    alike_ = [e for e in history.errors if e.untried == found.untried][-(MOST_ERRORS - 1) :]
    others = [e for e in history.errors if e.untried != found.untried]
    errors = sorted((*alike_, *others, found), key=lambda e: e.step)
    return replace(history, errors=tuple(errors), forecast=None)


def forecast(
    inputs: Inputs, history: History, options: Sequence[Option], seconds: float, *, untried: bool
) -> History:
    """Return the history with a forecast for the plan in force after this decision.

    Args:
        inputs: What is known.
        history: As ``next_errors`` left it; a forecast in it that was made before the plan was in
            use stays until it is compared.
        options: Option per bucket.
        seconds: Predicted step time; NaN if unknown.
        untried: Whether the plan is not in use yet.
    """
    if history.forecast is not None and history.forecast.untried and not untried:
        return history
    if not 0 < seconds < math.inf or not options:
        return replace(history, forecast=None)
    made = StepForecast(alike(options), float(seconds), untried, inputs.step)
    return replace(history, forecast=made)


def interval(
    errors: Sequence[StepError], options: Sequence[Option], *, untried: bool
) -> Interval | None:
    """Return where measured / predicted step time of a plan is to be expected; None if unknown.

    Taken from looks at the same plan if there are enough, else at the same compressor, else at all.

    Args:
        errors: How earlier forecasts turned out.
        options: Option per bucket, or the distinct ones.
        untried: Whether the plan is not in use yet.
    """
    pool = [e for e in errors if e.untried == untried]
    label, method = name(options), compressor(options)
    kind = "before their first use" if untried else "in use"
    for some, of in (
        ([e for e in pool if e.label == label], f"{label} {kind}"),
        ([e for e in pool if e.compressor == method], f"plans with {method} {kind}"),
    ):
        if len(some) >= ENOUGH:
            return _between(some, of)
    return _between(pool, f"plans {kind}") if len(pool) >= LEAST else None


def name(options: Sequence[Option]) -> str:
    """Return a plan for people: its distinct options in layout order, the fourth and later cut."""
    labels = list(dict.fromkeys(option.label for option in options))
    return " + ".join(labels[:3]) + (f" + {len(labels) - 3} more" if len(labels) > 3 else "")


def compressor(options: Sequence[Option]) -> str:
    """Return the compressor of a plan, ``MIXED`` if it has several."""
    names = {option.compressor for option in options}
    return names.pop() if len(names) == 1 else MIXED


def _between(errors: Sequence[StepError], of: str) -> Interval:
    ratios = sorted(e.ratio for e in errors)
    n = len(ratios)
    # 1e-9: of 19 looks the first and the last are meant, which rounding would miss.
    k = max(int((n + 1) * (1 - SHARE) / 2 + 1e-9), 1)
    return Interval(ratios[k - 1], ratios[n - k], (n + 1 - 2 * k) / (n + 1), n, of)

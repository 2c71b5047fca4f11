"""The last touch to a plan that skips: which buckets are spared, how partial means are scaled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gradpilot.policies.base import BucketState, Inputs
from gradpilot.policies.dwell import whole
from gradpilot.policies.importance import Importance, measure
from gradpilot.policies.signal import shrink_factor, signal_to_noise
from gradpilot.policies.skipping import contributions
from gradpilot.protos.messages import Option
from gradpilot.warm_up import STABLE_LOOKS, Warmth, next_warmth


def look(inputs: Inputs) -> Importance:
    """Return the importance of the buckets, measured again if all of them have been sampled."""
    known = inputs.history.importance
    rows = [bucket.magnitudes for bucket in inputs.buckets]
    if inputs.settings.selective == "off" or not all(rows) or len(set(map(len, rows))) != 1:
        return known
    names = [bucket.fingerprint for bucket in inputs.layout.buckets]
    return measure(known, names, rows, once=inputs.settings.selective == "once")


def snr(inputs: Inputs, present: Sequence[Option]) -> float:
    """Return the signal-to-noise ratio of one rank's gradient; -1 if it was never measured.

    Told only while everything is sent: under compression the mean that arrives is not the mean.
    """
    states = inputs.buckets
    if not present or not whole(present) or any(s.gradient_sq < 0 or s.mean_sq < 0 for s in states):
        return inputs.history.snr
    found = signal_to_noise(
        sum(s.gradient_sq for s in states), sum(s.mean_sq for s in states), inputs.world_size
    )
    return inputs.history.snr if found < 0 else found


def warm_up(inputs: Inputs, ratio: float, *, shock: str = "", rebase: bool = False) -> Warmth:
    """Return how far the warm-up is, from the gradient's norm and the signal-to-noise ratio.

    The space of candidates is made with what was known before, so it counts from the next decision.

    Args:
        inputs: What is known.
        ratio: See ``snr``.
        shock: See ``next_warmth``.
        rebase: See ``next_warmth``.
    """
    known = [bare_sq(s) for s in inputs.buckets]
    norm = math.sqrt(sum(known)) if known and min(known) >= 0 else -1.0
    # A ratio that was never measured cannot be waited for: under compression it cannot be.
    values = (norm, ratio) if ratio >= 0 else (norm,)
    return next_warmth(inputs.history.warmth, values, inputs.step, shock=shock, rebase=rebase)


def bare_sq(state: BucketState) -> float:
    """Return ||gradient||^2 of a bucket without the residual in it, -1 if unknown.

    Measured is the sum of both. On gradients of a small network the difference of the squares was
    0.9 to 1.6 times the gradient's at top-k of 1 %: noise makes residual and gradient nearly
    orthogonal.
    """
    residual = state.residual_sq
    return state.gradient_sq - residual if 0 < residual < state.gradient_sq else state.gradient_sq


def refine(
    inputs: Inputs,
    options: tuple[Option, ...],
    importance: Importance,
    ratio: float,
) -> tuple[Option, ...]:
    """Return the options with protected buckets spared, and divisors as the operator wants them.

    Args:
        inputs: For the layout and the settings.
        options: Option per bucket, in layout order.
        importance: Which buckets must not skip.
        ratio: See ``snr``.
    """
    spared = set(importance.protected) if inputs.settings.selective != "off" else set()
    refined = []
    for bucket, option in zip(inputs.layout.buckets, options, strict=True):
        if option.skip and bucket.fingerprint in spared:
            option = replace(option, skip=0)
        if option.skip:
            heard = contributions(option.collective, inputs.world_size, option.skip)
            divisor = inputs.settings.skip_divisor
            factor = shrink_factor(ratio, heard) if divisor == "shrink" else 1.0
            option = replace(option, divisor=divisor, shrink=factor)
        refined.append(option)
    return tuple(refined)


def explain(inputs: Inputs, options: Sequence[Option], importance: Importance) -> list[str]:
    """Return what to tell people: why nothing may be skipped yet, or who is spared from it."""
    warmth = inputs.history.warmth
    if not warmth.warm:
        return [
            "no steps are skipped before gradient norm and noise are stable"
            f" ({warmth.stable} of {STABLE_LOOKS} looks)"
        ]
    if inputs.settings.selective == "off" or not any(option.skip for option in options):
        return []
    count, total = len(importance.protected), len(inputs.layout.buckets)
    return [
        f"{count} of {total} buckets too important to skip (overlap with the set before"
        f" {importance.overlap:.2f}, with the first one {importance.since_first:.2f},"
        f" {importance.measurements} measurements)"
    ]

"""What one decision leaves to the next: how its forecast turned out, and which plan it left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from gradpilot.policies.base import Inputs
from gradpilot.policies.correction import FADED_STEPS, REMEMBERED
from gradpilot.policies.dwell import recent
from gradpilot.policies.gain import SMALLEST, GainModel, usable_gain
from gradpilot.policies.history import Departure, Forecast, GainRecord, History, ratio_bucket
from gradpilot.protos.messages import Family, LinkEstimate, Option

TRIAL_STEPS = 500
"""Steps under a plan in which its measured gain is compared with the forecast of its choice: long
enough for the residual to build up, too short for training to have moved on."""

MOST_RECORDS = 64
MOST_DEPARTURES = 16
"""Bounds of what is remembered."""


def next_history(
    inputs: Inputs,
    model: GainModel,
    present: tuple[Option, ...],
    chosen: tuple[Option, ...],
    link: LinkEstimate,
) -> History:
    """Return what the next decision should know.

    Args:
        inputs: What this decision knew.
        model: Its predictions of gain.
        present: Option per bucket in use; empty if unknown.
        chosen: Option per bucket to switch to; empty if the plan is kept.
        link: The link as it is now.
    """
    forecasts = inputs.history.forecasts
    return replace(
        inputs.history,
        layout=inputs.layout.digest,
        gains=_records(inputs, model, present),
        forecasts=_forecasts(inputs, model, chosen) if chosen else forecasts,
        departures=_departures(inputs, present, chosen, link),
    )


def _records(
    inputs: Inputs, model: GainModel, present: tuple[Option, ...]
) -> tuple[GainRecord, ...]:
    known = {
        (r.compressor, r.settings, ratio_bucket(r.ratio)): r
        for r in inputs.history.gains
        if inputs.step - r.step <= FADED_STEPS
    }
    forecasts = {
        (f.compressor, f.settings, ratio_bucket(f.ratio)): f.gain for f in inputs.history.forecasts
    }
    on_trial = inputs.steps_since_switch <= TRIAL_STEPS
    for family, option, buckets in _groups(inputs, present):
        buckets = [b for b in buckets if usable_gain(inputs.buckets[b].gain)]
        if option.skip or not buckets:
            continue
        key = (*option.family, ratio_bucket(option.ratio))
        old, forecast = known.get(key), forecasts.get(key)
        shares = model.weights[buckets] + SMALLEST
        measured = float(np.average([inputs.buckets[b].gain for b in buckets], weights=shares))
        floor = inputs.settings.gain_floor * family.floor_factor
        missed = measured if measured < floor else -1.0
        if old is not None and not (on_trial and forecast):
            factor = old.factor
        else:
            bare = forecast or _mean_gain(model, family, option.ratio, buckets)
            factor = float(np.clip(measured / max(bare, SMALLEST), *REMEMBERED))
        if math.isfinite(factor):
            known.pop(key, None)  # the newest goes last
            known[key] = GainRecord(*option.family, option.ratio, factor, inputs.step, missed)
    return tuple(known.values())[-MOST_RECORDS:]


def _forecasts(
    inputs: Inputs, model: GainModel, chosen: tuple[Option, ...]
) -> tuple[Forecast, ...]:
    return tuple(
        Forecast(*option.family, option.ratio, _mean_gain(model, family, option.ratio, buckets))
        for family, option, buckets in _groups(inputs, chosen)
    )


def _departures(
    inputs: Inputs,
    present: tuple[Option, ...],
    chosen: tuple[Option, ...],
    link: LinkEstimate,
) -> tuple[Departure, ...]:
    using, wanted = (tuple(dict.fromkeys(options)) for options in (present, chosen))
    known = recent(inputs)
    if known and known[-1].to != using:  # turned down by a rank, or overruled by an operator
        known = known[:-1]
    if using and wanted:
        known += (
            Departure(using, wanted, inputs.step, link.alpha_seconds, link.beta_seconds_per_byte),
        )
    return known[-MOST_DEPARTURES:]


def _groups(
    inputs: Inputs, options: Sequence[Option]
) -> Iterable[tuple[Family, Option, list[int]]]:
    """Yield every option of a known family with its buckets."""
    families = {(f.compressor, f.settings): f for f in inputs.families}
    groups: dict[Option, list[int]] = {}
    for b, option in enumerate(options):
        groups.setdefault(option, []).append(b)
    for option, buckets in groups.items():
        if option.family in families and 0 < option.ratio <= 1:
            yield families[option.family], option, buckets


def _mean_gain(model: GainModel, family: Family, ratio: float, buckets: list[int]) -> float:
    gains = model.predicted(family, np.array([ratio]))[0, buckets]
    return float(np.average(gains, weights=model.weights[buckets] + SMALLEST))

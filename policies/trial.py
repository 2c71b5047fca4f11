"""Do no harm: a switch is on trial until it has proved itself, and undone if it made things worse.

The plan is judged by what it costs, step time / efficiency from the measured gain, against what
the plan before it cost: as measured then, or as predicted for the present link and the present
waiting for slower ranks, whichever is more. So neither a link that became slower nor a straggler is
blamed on the plan. What is blamed is compute that became slower on all ranks alike with the switch:
compression competes with backward for the same cores.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gradpilot.policies.base import Inputs
from gradpilot.policies.dwell import whole
from gradpilot.policies.evaluation import Evaluation
from gradpilot.policies.problem import Space
from gradpilot.policies.watches import Trial
from gradpilot.protos.messages import Option

LOOKS = 2
"""Looks in a row that decide: a window may be spoilt by what happened in it."""

OTHER_COMPUTE = 2.0
"""Compute that changed by this factor is another load, such as longer sequences: no verdict."""

LOSS_STEPS = 500
"""Steps after the switch in which a rise of the loss is put down to it."""

LEAST_LOSSES = 4
"""Losses needed under either plan."""

LOSS_SIGMAS = 4.0
LOSS_RISE = 0.1
"""A median loss counts as risen beyond so many standard deviations (from the median absolute
deviation before the switch) and this share."""


class Verdict(NamedTuple):
    """The trial as it goes on (None: it is over), and why the switch is undone (else empty)."""

    trial: Trial | None
    cause: str = ""
    reason: str = ""


def begin(
    inputs: Inputs,
    left: Sequence[Option],
    to: Sequence[Option],
    old: Evaluation | None,
    new: Evaluation,
    index: int,
) -> Trial | None:
    """Return the trial of a switch; None if there is nothing to try.

    A plan that sends everything is safe and needs no trial, and one that is taken for another
    reason than its cost cannot be held to it.

    Args:
        inputs: What was known at the switch; its history with the trial under way.
        left: Option per bucket so far; empty if unknown.
        to: Option per bucket from now on.
        old: Prediction for ``left``.
        new: Predictions for candidates.
        index: Number of the candidate taken.
    """
    if not left or old is None or not old.valid[0] or whole(to):
        return None
    if not float(new.cost[index]) < float(old.cost[0]):
        return None
    unproven = inputs.history.trial
    if unproven is not None and unproven.fine < LOOKS:
        # Held to the last plan that proved itself, not to one that may be worse than that.
        return replace(unproven, to=alike(to), step=inputs.step, worse=0, fine=0, rising=0)
    measured = inputs.step_seconds
    return Trial(
        left=alike(left),
        to=alike(to),
        step=inputs.step,
        left_seconds=measured if 0 < measured < math.inf else 0.0,
        left_efficiency=float(old.efficiency[0]),
        compute_seconds=inputs.compute_seconds,
        waited_seconds=_waited(inputs),
        losses=inputs.history.regime.losses,
    )


def proceed(inputs: Inputs, space: Space, present: Evaluation | None) -> Verdict:
    """Return what becomes of the trial under way at this look.

    Args:
        inputs: What is known.
        space: Models.
        present: Prediction for the plan in force, its efficiency corrected by its measured gain.
    """
    trial = inputs.history.trial
    if trial is None or inputs.history.layout != inputs.layout.digest:
        return Verdict(None)
    if expand(trial.to, inputs) != space.current_options:
        return Verdict(None)  # turned down by a rank, or overruled by an operator
    if inputs.steps_since_switch < inputs.settings.trial_steps:
        return Verdict(trial)
    verdict = _by_cost(trial, inputs, space, present)
    if verdict.reason or verdict.trial is None:
        return verdict
    verdict = _by_loss(verdict.trial, inputs)
    if verdict.reason or verdict.trial is None:
        return verdict
    over = inputs.step - trial.step > LOSS_STEPS
    return Verdict(None) if over and verdict.trial.fine >= LOOKS else verdict


def expand(options: tuple[Option, ...], inputs: Inputs) -> tuple[Option, ...]:
    """Return an option per bucket of what a trial remembers."""
    return options * len(inputs.layout.buckets) if len(options) == 1 else options


def reference_cost(trial: Trial, inputs: Inputs, space: Space) -> float:
    """Return what the plan before would cost now, seconds per dense step's worth; NaN: unknown."""
    numbers = {option: space.add(option) for option in dict.fromkeys(trial.left)}
    row = [numbers[option] for option in expand(trial.left, inputs)]
    if any(k is None for k in row):
        return math.nan
    predicted = float(space.evaluate(np.array([row], dtype=np.intp)).step_seconds[0])
    waited = max(_waited(inputs) - trial.waited_seconds, 0.0)
    slower = max(inputs.compute_seconds - trial.compute_seconds - waited, 0.0)
    return max(predicted - slower, trial.left_seconds) / trial.left_efficiency


def _by_cost(trial: Trial, inputs: Inputs, space: Space, present: Evaluation | None) -> Verdict:
    """Compare costs; a trial that was passed by them is not looked at again."""
    if trial.fine >= LOOKS:
        return Verdict(trial)
    before, now = trial.compute_seconds, inputs.compute_seconds
    if max(before, now) > OTHER_COMPUTE * min(before, now):
        return Verdict(replace(trial, worse=0, fine=LOOKS))
    measured = inputs.step_seconds
    if present is None or not present.valid[0] or not 0 < measured < math.inf:
        return Verdict(trial)
    cost = measured / float(present.efficiency[0])
    reference = reference_cost(trial, inputs, space)
    if not math.isfinite(reference):
        return Verdict(trial)
    if not cost > reference * (1 + inputs.settings.trial_margin):
        return Verdict(replace(trial, worse=0, fine=trial.fine + 1))
    trial = replace(trial, worse=trial.worse + 1, fine=0)
    if trial.worse < LOOKS:
        return Verdict(trial)
    return Verdict(
        None,
        "cost",
        f"it costs {1e3 * cost:.3g} ms per dense step's worth as measured, the plan before it"
        f" {1e3 * reference:.3g} ms",
    )


def _by_loss(trial: Trial, inputs: Inputs) -> Verdict:
    if inputs.step - trial.step > LOSS_STEPS or not trial.losses:
        return Verdict(trial)
    if (rise := _risen(trial.losses, inputs.history.regime.losses, inputs.loss)) is None:
        return Verdict(replace(trial, rising=0))
    trial = replace(trial, rising=trial.rising + 1)
    if trial.rising < LOOKS:
        return Verdict(trial)
    return Verdict(None, "loss", f"the loss rose from {rise[0]:.4g} to {rise[1]:.4g} under it")


def _risen(
    before: Sequence[float], since: Sequence[float], newest: float
) -> tuple[float, float] | None:
    """Return the losses before and since if they rose beyond their noise; else None."""
    known = bool(since) and since[-1] == newest and newest != math.inf
    since = tuple(since) if known else (*since, newest)
    since = [loss for loss in since if not math.isnan(loss)][-LEAST_LOSSES:]
    if min(len(before), len(since)) < LEAST_LOSSES or not all(map(math.isfinite, before)):
        return None
    old, new = statistics.median(before), statistics.median(since)
    spread = 1.4826 * statistics.median(abs(loss - old) for loss in before)
    bound = old + max(LOSS_SIGMAS * spread, LOSS_RISE * abs(old))
    return (old, new) if new > bound and min(since) > old else None


def _waited(inputs: Inputs) -> float:
    waited = inputs.straggle_seconds
    return waited if 0 < waited < math.inf else 0.0


def alike(options: Sequence[Option]) -> tuple[Option, ...]:
    """Return a single option if all are the same, else all of them; ``expand`` undoes it."""
    return (options[0],) if len(set(options)) == 1 else tuple(options)

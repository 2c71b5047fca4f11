"""What must hold before a plan is replaced."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradpilot.policies.base import Inputs
from gradpilot.protos.messages import Option


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to switch, and why (not)."""

    switch: bool
    reason: str


def sane(inputs: Inputs) -> str:
    """Return what makes a decision impossible; empty if nothing does."""
    if inputs.world_size < 2:
        return "one rank has nothing to synchronise"
    if not inputs.layout.buckets:
        return "the layout has no buckets yet"
    if len(inputs.buckets) != len(inputs.layout.buckets):
        return (
            f"{len(inputs.buckets)} bucket states for {len(inputs.layout.buckets)} buckets:"
            " the reports belong to another layout"
        )
    if not inputs.families:
        return "no catalog yet"
    if not (math.isfinite(inputs.compute_seconds) and inputs.compute_seconds >= 0):
        return f"compute time is {inputs.compute_seconds} s"
    return ""


def judge(
    inputs: Inputs,
    current: tuple[Option, ...],
    chosen: tuple[Option, ...],
    gain: float,
    permitted: bool = True,
) -> Verdict:
    """Decide whether ``chosen`` replaces the plan in force.

    Args:
        inputs: For the settings and the steps since the last switch.
        current: Option per bucket in force; empty if there is no plan.
        chosen: Option per bucket wanted.
        gain: Predicted saving over the plan in force, a share; NaN if that cannot be predicted.
        permitted: Whether the plan in force keeps the gain floor; if not, it must go at any cost.
    """
    settings = inputs.settings
    if not current:
        return Verdict(True, "first plan")
    if chosen == current:
        return Verdict(False, "already in force")
    if inputs.steps_since_switch < settings.dwell_steps:
        return Verdict(
            False,
            f"only {inputs.steps_since_switch} of {settings.dwell_steps} steps since the last"
            " switch",
        )
    if not permitted:
        return Verdict(
            True, f"the plan in force is below the gain floor of {settings.gain_floor:g}"
        )
    if math.isnan(gain):
        return Verdict(True, "the plan in force cannot be predicted")
    if gain < settings.min_improvement:
        return Verdict(
            False, f"saves {100 * gain:.1f} %, less than {100 * settings.min_improvement:.1f} %"
        )
    return Verdict(True, f"saves {100 * gain:.1f} %")

"""What must hold before a plan is replaced, or ranks are asked for a probe."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.dwell import Dwell
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
    needed: Dwell | None = None,
    *,
    why: str = "",
    doubt: str = "",
) -> Verdict:
    """Decide whether ``chosen`` replaces the plan in force.

    Args:
        inputs: For the settings and the steps since the last switch.
        current: Option per bucket in force; empty if there is no plan.
        chosen: Option per bucket wanted.
        gain: Predicted saving over the plan in force, a share; NaN if that cannot be predicted.
        permitted: Whether the plan in force keeps the gain floor and is not black-listed; if not,
            it must go at any cost.
        needed: How long the plan in force must stay before ``chosen``; None for the least.
        why: Why the plan in force is not permitted; by default it is below the gain floor.
        doubt: Why nothing that was measured should be acted on; empty if it should.
    """
    settings = inputs.settings
    least = Dwell(settings.dwell_steps)
    steps, times = needed if needed is not None and permitted else least
    if doubt:
        return Verdict(False, doubt)
    if not current:
        return Verdict(True, "first plan")
    if chosen == current:
        return Verdict(False, "already in force")
    if inputs.steps_since_switch < steps:
        again = f", for it was left {times} times lately" if times else ""
        return Verdict(
            False, f"only {inputs.steps_since_switch} of {steps} steps since the last switch{again}"
        )
    if not permitted:
        floor = f"is below the gain floor of {settings.gain_floor:g}"
        return Verdict(True, f"the plan in force {why or floor}")
    if math.isnan(gain):
        return Verdict(True, "the plan in force cannot be predicted")
    if gain < settings.min_improvement:
        return Verdict(
            False, f"saves {100 * gain:.1f} %, less than {100 * settings.min_improvement:.1f} %"
        )
    return Verdict(True, f"saves {100 * gain:.1f} %")


def undo(current: tuple[Option, ...], back: tuple[Option, ...], reason: str) -> Verdict:
    """Decide whether the plan in force can be undone.

    Args:
        current: Option per bucket in force.
        back: Option per bucket to go back to.
        reason: What it did.
    """
    if back == current:
        return Verdict(False, f"{reason}, but nothing safer is there")
    return Verdict(True, f"undone: {reason}")


def settle(outcome: Outcome, inputs: Inputs) -> Outcome:
    """Return what becomes of a policy's answer: a probe that is under way is not asked again."""
    if outcome.outcome != "probe" or not inputs.probing:
        return outcome
    return replace(
        outcome,
        outcome="keep",
        reason=f"kept: the probe of decision {inputs.probing} is under way. {outcome.reason}",
        probe_bytes=(),
    )

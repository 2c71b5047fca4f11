"""What was measured when a decision was taken, in the few figures that people ask for."""

from __future__ import annotations

from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.regime import total_gain
from gradpilot.protos.explanations import Seen


def seen(inputs: Inputs, outcome: Outcome) -> Seen:
    """Return what was measured.

    Args:
        inputs: What the policy was asked.
        outcome: What it answered; its history has the newest ratios of noise and residual.
    """
    history = outcome.history if outcome.history is not None else inputs.history
    return Seen(
        ranks=inputs.world_size,
        steps=inputs.steps_since_switch,
        step_seconds=inputs.step_seconds,
        compute_seconds=inputs.compute_seconds,
        straggle_seconds=inputs.straggle_seconds,
        slowest_rank=inputs.slowest_rank,
        slowest_seconds=inputs.slowest_seconds,
        gain=total_gain(inputs),
        snr=history.snr,
        residual_ratio=history.residuals.last,
    )

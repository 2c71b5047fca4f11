"""When gradient contributions and weights may be skipped: by a rule that all ranks apply alike.

The rule is that of the controller's policies (``gradpilot.warm_up``). It is applied here, since no
controller plans sharded jobs yet: every so many steps the ranks add up what they saw, so all of
them look at the same two numbers: the norm of the mean gradient, and the share of a rank's gradient
that the ranks agree on, ||mean||^2 / mean of ||gradient||^2, which falls and rises with the
signal-to-noise ratio.
"""

from __future__ import annotations

import math

from gradpilot.warm_up import Warmth, next_warmth

LOOK_STEPS = 10
"""Steps between two looks: warm after 30 stable steps at the earliest."""


class WarmUp:
    """How far one model is.

    Args:
        needed: Whether to wait at all; if not, the model counts as warm from the start.
    """

    def __init__(self, needed: bool) -> None:
        self._needed = needed
        self._warmth = Warmth()

    @property
    def warm(self) -> bool:
        """Return whether contributions may be skipped."""
        return not self._needed or self._warmth.warm

    def wants(self, step: int) -> bool:
        """Return whether this step is looked at; the same on all ranks."""
        return self._needed and step % LOOK_STEPS == 0

    def look(self, step: int, gradient_sq: float, mean_sq: float) -> None:
        """Take what one step showed.

        Args:
            step: Number of the step.
            gradient_sq: Mean over ranks of ||own gradient||^2; NaN if not finite.
            mean_sq: ||mean gradient||^2 over all shards, as it arrived.
        """
        before = self._warmth
        known = gradient_sq > 0.0 and mean_sq >= 0.0
        agreed = mean_sq / gradient_sq if known else math.nan
        norm = math.sqrt(mean_sq) if mean_sq >= 0.0 else math.nan
        # The first look under skips is smaller for that reason alone.
        rebase = before.warm and before.since_step + LOOK_STEPS == step
        self._warmth = next_warmth(before, (norm, agreed), step, rebase=rebase)

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint needs so that the warm-up is not repeated."""
        warmth = self._warmth
        return {"averages": list(warmth.averages), "warm": warmth.warm, "stable": warmth.stable}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from ``state_dict``."""
        averages = state["averages"]
        assert isinstance(averages, list)
        self._warmth = Warmth(
            averages=tuple(float(value) for value in averages),
            stable=int(str(state["stable"])),
            warm=bool(state["warm"]),
        )

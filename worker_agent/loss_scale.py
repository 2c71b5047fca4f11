"""Follows the loss scale of mixed-precision training.

With a scaled loss the gradients that arrive are scaled as well, and so is what was kept back of
earlier ones. When the scale changes between two steps, that has to change with it, or a residual
would be sent at twice or half of its worth.
"""

from __future__ import annotations

import math
from typing import Protocol


class Scaler(Protocol):
    """What is needed of ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """Return the factor of the loss; 1 if scaling is off."""
        ...


class LossScale:
    """The scale of the gradients, as of the newest look.

    Args:
        scaler: Knows the scale, the same on all ranks; None if losses are not scaled.
    """

    def __init__(self, scaler: Scaler | None = None) -> None:
        self._scaler = scaler
        self.value = 1.0

    def look(self) -> float:
        """Look at the scale; return by what kept vectors must be multiplied, mostly 1.

        Call once a step, before its gradients are used. On CUDA the host waits for the device, as
        the scaler's own ``step`` has done a moment before.

        A scale that is no positive number counts as the one before: such a step is not finite
        anyhow, and changes nothing that is kept.
        """
        if self._scaler is None:
            return 1.0
        scale = float(self._scaler.get_scale())
        if not 0.0 < scale < math.inf:
            return 1.0
        factor, self.value = scale / self.value, scale
        return factor

    def restore(self, scale: float) -> None:
        """Take over the scale in which a checkpoint holds its vectors."""
        self.value = scale

"""Hard threshold: every rank sends what is large enough, however much that is.

Letters: n elements of the bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors._magnitudes import above, least_positive
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors._select import kept, largest
from gradpilot.worker_agent.compressors._sparse_message import average_unequal
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Rounds
from gradpilot.worker_agent.compressors.settings import choice, real


@COMPRESSORS.register("threshold")
@dataclass(frozen=True, kw_only=True)
class Threshold(Compressor):
    """Keeps every element whose magnitude reaches a threshold; zeros never.

    Ranks may send different numbers of elements, and none at all. An ``absolute`` threshold holds
    what is left behind of every element below a fixed bound, but it needs tuning to the model, and
    to the loss scale if there is one. One relative to the root mean square (``rms``) of the
    corrected gradient moves with it.

    Attributes:
        threshold: Least magnitude to send, as a number or in units of the root mean square.
        unit: What the threshold is relative to, ``rms`` or ``absolute``.
    """

    name: ClassVar[str] = "threshold"
    source: ClassVar[str] = "Strom 2015 and Sahu et al. 2021 (hard threshold), from memory"
    exchange = "all_gather"
    fixed_wire = False

    threshold: float = real(3.0, 0.0, 1e30)
    unit: str = choice("rms", "absolute")

    @classmethod
    def ladder(cls) -> Sequence[Threshold]:
        """Return relative thresholds, which suit any model: about 24, 6, 1.4 and .3 % of it."""
        return tuple(cls(threshold=threshold) for threshold in (1.0, 2.0, 3.0, 4.0))

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return the lengths and what to expect of 8 bytes for each element sent.

        As many reach a relative threshold as of a Laplace distribution, which is derived for no
        particular model. Nothing is known of an absolute one: all of them.
        """
        share = math.exp(-math.sqrt(2.0) * self.threshold) if self.unit == "rms" else 1.0
        return (WireRound("all_gather", 8), WireRound("all_gather", 8 * kept(n, share)))

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Select what reaches the threshold, gather what may differ in length."""
        return (yield from average_unequal(grad, self._select(grad), at))

    def _select(self, grad: Tensor) -> Tensor:
        threshold = self.threshold
        if self.unit == "rms":
            threshold *= root_mean_square(grad)
        if not math.isfinite(threshold) or bool(grad[0].isnan()):
            # One element tells the other ranks; comparing would send all that is NaN.
            return largest(grad, 1)
        return above(grad, max(threshold, least_positive(grad)))


def root_mean_square(x: Tensor) -> float:
    """Return the root mean square of a 1-D tensor, computed at fp32 or better."""
    norm = float(torch.linalg.vector_norm(x, dtype=precise_dtype(x)))
    if not 0.0 < norm < math.inf:  # squares overflow above 1.8e19 in fp32, and vanish below 1e-23
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return norm / math.sqrt(x.numel())

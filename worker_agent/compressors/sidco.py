"""SIDCo (Abdelmoniem et al., MLSys 2021): a threshold from a distribution fitted to the gradient.

Letters: n elements of the bucket, k elements that the ratio asks for, m number of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors._magnitudes import above, least_positive, sampled
from gradpilot.worker_agent.compressors._select import kept, largest
from gradpilot.worker_agent.compressors._sparse_message import average_unequal
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Estimate, Rounds
from gradpilot.worker_agent.compressors.settings import SPARSE_RATIOS, kept_fraction, real

MOST_STAGES = 6
"""More leave too few elements of a sample to fit to."""

# Elements fitted to at least: at a ratio of .001 the number selected errs by 10 % from chance.
_SAMPLE = 1 << 16
_FIRST_STAGES = 2
# |ln(selected / k)| that needs no other number of stages: 20 %.
_TOLERANCE = math.log(1.2)
# What another number of stages missed fades, by half in 35 steps: gradients change, and so may the
# ratio. Then a neighbour is tried again, but only where the present one misses.
_FADING = 0.98
# Beyond k times or a k-th of this the fit is no use, and the exact top-k is sent.
_FAR_OFF = 4


@COMPRESSORS.register("sidco")
@dataclass(frozen=True, kw_only=True)
class Sidco(Compressor):
    """Keeps about k elements: those above a threshold that an exponential distribution gives.

    Magnitudes are fitted in stages: the first keeps the fraction ``first`` of all; each further
    one is fitted to what exceeded the threshold before, and all of them together keep the ratio.
    The fit looks at a sample of large buckets. How many stages come closest depends on the tail of
    the gradient, so every rank moves, step by step, to the number that missed least.

    That 20 % are tolerated is the paper's, from memory; the search and the exact top-k where the
    fit is off by more than a factor of 4 are ours. (Without it, elements of equal magnitude would
    never be sent: their number does not shrink with the threshold until it is zero.)

    Attributes:
        ratio: Fraction k/n to keep, (0, 1].
        first: Fraction that the first stage keeps; .25 is the paper's, from memory.
    """

    name: ClassVar[str] = "sidco"
    source: ClassVar[str] = "Abdelmoniem et al. 2021 (SIDCo-Exp)"
    exchange = "all_gather"
    fixed_wire = False
    gain_model: ClassVar[str] = "energy"

    ratio: float = kept_fraction(0.01)
    first: float = real(0.25, 0.01, 0.99)

    @classmethod
    def ladder(cls) -> Sequence[Sidco]:
        """Return ratios about a factor of 3 apart."""
        return tuple(cls(ratio=ratio) for ratio in SPARSE_RATIOS)

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return the lengths and the 8k bytes that are aimed at."""
        return (WireRound("all_gather", 8), WireRound("all_gather", 8 * kept(n, self.ratio)))

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Select what exceeds the fitted threshold, gather what differs in length."""
        k = kept(grad.numel(), self.ratio)
        if k == grad.numel():
            indices = torch.arange(k, device=grad.device)
            return (yield from average_unequal(grad, indices, at))

        stages = int(at.memory.get("stages", _FIRST_STAGES))
        threshold = fitted_threshold(sampled(grad, _SAMPLE), self.ratio, self.first, stages)
        if math.isnan(threshold):
            # One element tells the other ranks; comparing would send all that is NaN.
            return (yield from average_unequal(grad, largest(grad, 1), at))
        indices = above(grad, max(threshold, least_positive(grad)))
        memory = adapted(at.memory, stages, indices.numel(), k)
        if not k / _FAR_OFF <= indices.numel() <= k * _FAR_OFF:
            indices = largest(grad, k)

        estimate = yield from average_unequal(grad, indices, at)
        return Estimate(estimate.mean, estimate.sent, memory=memory)


def fitted_threshold(magnitudes: Tensor, ratio: float, first: float, stages: int) -> float:
    """Return the threshold that a fraction ``ratio`` is expected to reach.

    Args:
        magnitudes: 1-D, at fp32 or better.
        ratio: Fraction that all stages together keep.
        first: Fraction that the first of several stages keeps. One stage only if it is not above
            ``ratio``.
        stages: Number of stages; fewer if nothing is left to fit to.
    """
    if stages == 1 or ratio >= first:
        fractions = [ratio]
    else:
        fractions = [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)
    threshold, least, tail = 0.0, 0.0, magnitudes
    for fraction in fractions:
        # Exponential above its least value: the mean excess is the scale.
        threshold = least - (float(tail.mean(dtype=torch.float64)) - least) * math.log(fraction)
        tail = tail[tail >= threshold]
        if not tail.numel():
            break
        least = float(tail.min())
    return threshold


def adapted(memory: Mapping[str, Tensor], stages: int, selected: int, k: int) -> dict[str, Tensor]:
    """Return the memory for the next step: by how much each number of stages missed, and the next.

    A number not tried yet counts as no miss, so that each neighbour of a bad one is tried once.

    Args:
        memory: That of the step before.
        stages: Number of stages used in this step.
        selected: Elements that the threshold selected.
        k: Elements that it should have.
    """
    known = memory.get("misses")
    misses = torch.zeros(MOST_STAGES + 1) if known is None else known * _FADING
    miss = abs(math.log(max(selected, 0.5) / k))
    misses[stages] = miss
    best = stages
    if miss > _TOLERANCE:
        near = [stages, stages + 1, stages - 1]  # more rather than fewer, if equal
        best = min((m for m in near if 1 <= m <= MOST_STAGES), key=lambda m: float(misses[m]))
    return {"misses": misses, "stages": torch.tensor(best)}

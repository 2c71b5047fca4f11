"""DGC (Lin et al., "Deep Gradient Compression", ICLR 2018): top-k with momentum correction.

Letters: n elements of the bucket, k kept elements, c ratio, m momentum; per rank, by element: g
gradient, r residual, u velocity, v = r + u what is selected from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors._magnitudes import above, least_positive, sampled
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors._select import kept, largest
from gradpilot.worker_agent.compressors._sparse_message import average_unequal
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Estimate, Rounds
from gradpilot.worker_agent.compressors.settings import SPARSE_RATIOS, kept_fraction, real, whole

# Elements of a sample at least; 1 % of buckets of a million and more.
_SAMPLE = 1 << 13
_REFINEMENTS = 10
_TOO_FEW, _TOO_MANY = 0.8, 1.3
_LOWER = 0.8


@COMPRESSORS.register("dgc")
@dataclass(frozen=True, kw_only=True)
class Dgc(Compressor):
    """Keeps up to k of the largest elements of what momentum has accumulated.

    An optimizer with momentum treats an element that waited in the residual as one late, large
    gradient. With ``momentum`` the rank itself accumulates a velocity, ``u = m u + g``, and sends
    from the sum of velocities. **The optimizer's own momentum must then be 0**, or it is applied
    twice; the compressor cannot see the optimizer, so it is 0 by default, and the ladder has no
    other members. Where an element is sent, its velocity is cleared as well (momentum factor
    masking), so that it does not push on in a direction that is out of date. At a ratio of 1
    nothing waits, nothing is masked, and the result is that of momentum SGD.

    The threshold is that of a sample; it is lowered up to 10 times, to 80 % each, while fewer than
    .8k elements reach it, and of more than k the k largest are taken. So ranks send different
    numbers of elements, at most k.

    During the first W = ``warm_up`` steps of the run, counted from e = 0, the ratio is
    c^((e+1)/(W+1)). Steps of the run and not of this compressor, since ranks must agree on it while
    their memories may differ (after a resume with another world size).

    With momentum two vectors of n elements are remembered: u, and r to tell g from g + r.

    Attributes:
        ratio: Kept fraction c = k/n, (0, 1], after the warm-up.
        momentum: m, [0, 1). Set the optimizer's own to 0 if this is not.
        warm_up: Steps W.
    """

    name: ClassVar[str] = "dgc"
    source: ClassVar[str] = "Lin et al. 2018 (DGC); selection as in the authors' code"
    exchange = "all_gather"
    fixed_wire = False
    linear_memory: ClassVar[tuple[str, ...]] = ("velocity", "residual")
    gain_model: ClassVar[str] = "energy"

    ratio: float = kept_fraction(0.01)
    momentum: float = real(0.0, 0.0, 0.9999)
    warm_up: int = whole(0, 0, 1_000_000_000)

    @classmethod
    def ladder(cls) -> Sequence[Dgc]:
        """Return ratios about a factor of 3 apart, without momentum."""
        return tuple(cls(ratio=ratio) for ratio in SPARSE_RATIOS)

    def ratio_at(self, step: int) -> float:
        """Return the kept fraction in a step of the run."""
        if step >= self.warm_up:
            return self.ratio
        return float(self.ratio ** ((step + 1) / (self.warm_up + 1)))

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return the lengths and 8k bytes, to be expected after the warm-up."""
        return (WireRound("all_gather", 8), WireRound("all_gather", 8 * kept(n, self.ratio)))

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Add the velocity, select by a sampled threshold, gather, mask the velocity."""
        k = kept(grad.numel(), self.ratio_at(at.step))
        if self.momentum == 0.0:
            return (yield from average_unequal(grad, select(grad, k), at))

        carried, accumulated, velocity = self._accumulate(grad, at)
        indices = select(accumulated, k)
        if k < grad.numel():
            velocity.index_fill_(0, indices, 0.0)
        # Nothing reads the gradient any more.
        there = replace(at, feedback=True, out=at.room(grad))
        estimate = yield from average_unequal(accumulated, indices, there)
        residual = accumulated.index_fill_(0, indices, 0.0)
        memory = {"velocity": velocity, "residual": residual}
        return Estimate(estimate.mean, estimate.sent, carried, memory)

    def _accumulate(self, grad: Tensor, at: At) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return m u_old, v = corrected + m u_old, and u = v - r_old; all of them fresh."""
        precise = precise_dtype(grad)
        before = at.memory.get("velocity")
        if before is None:
            return None, grad.clone(), grad.to(precise, copy=True)
        carried = before.mul(self.momentum).to(grad.dtype)
        accumulated = grad + carried
        return carried, accumulated, accumulated.to(precise).sub(at.memory["residual"])


def select(x: Tensor, k: int) -> Tensor:
    """Return the indices of .8k to k elements of large magnitude, ascending; zeros never.

    Fewer if so many are not to be had within ten refinements.

    Args:
        x: 1-D contiguous float tensor of n elements.
        k: How many at most, 1 .. n.

    Returns:
        int64 tensor.
    """
    if k == x.numel():
        return torch.arange(k, device=x.device)
    if bool(x[0].isnan()):
        # One element tells the other ranks; comparing would send all that is NaN.
        return largest(x, 1)
    sample = sampled(x, _SAMPLE)
    rank = max(1, round(k * sample.numel() / x.numel()))
    least = least_positive(x)
    threshold = max(float(torch.topk(sample, rank, sorted=False).values.min()), least)
    hits = above(x, threshold)
    for _ in range(_REFINEMENTS):
        if hits.numel() >= _TOO_FEW * k or threshold == least:
            break
        threshold = max(threshold * _LOWER, least)
        hits = above(x, threshold)
    if hits.numel() <= k:
        return hits
    return hits.index_select(0, largest(x.index_select(0, hits), k))

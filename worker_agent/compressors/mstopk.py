"""MSTopk (Shi et al., MLSys 2021): k elements by a threshold that is searched, not sorted for.

Letters: n elements of the bucket, k kept elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors._magnitudes import (
    above,
    least_positive,
    mean_and_largest,
    sampled,
)
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors._select import kept, largest
from gradpilot.worker_agent.compressors._sparse_message import average_selected
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Rounds
from gradpilot.worker_agent.compressors.settings import SPARSE_RATIOS, kept_fraction

SAMPLE = 1 << 13
"""Elements that the floor of the search is taken from, at least."""

_ROUNDS = 25
# Below this a filter saves less than it costs.
_FILTER_MIN_ELEMENTS = 1 << 17


@COMPRESSORS.register("mstopk")
@dataclass(frozen=True, kw_only=True)
class MsTopK(Compressor):
    """Keeps k elements, most of them the largest.

    25 bisections between mean and maximum of the magnitudes end with a threshold that at most k
    elements reach, and one that more than k reach. All that reach the former are sent; what is
    missing is a window of consecutive ones among those in between, at a place drawn by every rank
    for itself. One very large element leaves the two far apart, and the window nearly random.

    Attributes:
        ratio: Kept fraction k/n, (0, 1].
    """

    name: ClassVar[str] = "mstopk"
    source: ClassVar[str] = "Shi et al. 2021 (MSTopk), as in Tyagi and Swany, 2023"
    exchange = "all_gather"
    gain_model: ClassVar[str] = "energy"

    ratio: float = kept_fraction(0.01)

    @classmethod
    def ladder(cls) -> Sequence[MsTopK]:
        """Return ratios about a factor of 3 apart."""
        return tuple(cls(ratio=ratio) for ratio in SPARSE_RATIOS)

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one all-gather of k fp32 values and k int32 indices: 8k bytes."""
        return (WireRound("all_gather", 8 * kept(n, self.ratio)),)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Search the thresholds, take exactly k elements, gather them."""
        k, place = kept(grad.numel(), self.ratio), at.random("window", own=True)
        return (yield from average_selected(grad, select(grad, k, place), at))


def select(x: Tensor, k: int, place: int) -> Tensor:
    """Return the indices of exactly k elements, ascending.

    Args:
        x: 1-D contiguous float tensor of n elements.
        k: How many, 1 .. n.
        place: Random number that says where the window begins.

    Returns:
        int64 tensor of k indices; the host does not wait for a device.
    """
    n = x.numel()
    if k == n:
        return torch.arange(k, device=x.device)
    if x.device.type == "cpu" and n >= _FILTER_MIN_ELEMENTS and 4 * k <= n:
        return _select_filtered(x, k, place)
    return select_from_all(x, k, place)


def select_from_all(x: Tensor, k: int, place: int) -> Tensor:
    """Do as ``select``, looking at every element in every bisection."""
    magnitudes = x.abs().to(precise_dtype(x))
    # What is not finite counts as the largest; then neither thresholds nor their mean are NaN.
    most = torch.finfo(magnitudes.dtype).max
    magnitudes.nan_to_num_(nan=most, posinf=most)
    mean = magnitudes.sum(dtype=torch.float64) / x.numel()
    upper, lower = _bisect(magnitudes, k, mean, magnitudes.max().double())
    return _exactly(magnitudes, k, upper, lower, place)


def _select_filtered(x: Tensor, k: int, place: int) -> Tensor:
    """Do as ``select``, looking again and again only at the few elements that may be sent.

    A sample gives a floor that a few more than k elements reach. Counts at thresholds above it
    need these elements alone; a threshold below it is reached by more than k in any case.
    """
    mean, most = mean_and_largest(x)
    if not math.isfinite(mean):
        return largest(x, k)
    sample = sampled(x, SAMPLE)
    expected = k * sample.numel() / x.numel()
    # Four standard deviations on the safe side, as for a random sample.
    rank = min(sample.numel(), math.ceil(expected + 4.0 * math.sqrt(expected) + 4.0))
    floor = float(torch.topk(sample, rank, sorted=False).values.min())
    candidates = above(x, max(floor, least_positive(x)))
    if candidates.numel() <= k:
        return select_from_all(x, k, place)
    magnitudes = x.index_select(0, candidates).abs().to(precise_dtype(x))
    upper, lower = _bisect(
        magnitudes, k, torch.tensor(mean).double(), torch.tensor(most).double(), floor
    )
    if float(lower) < floor:
        candidates = above(x, float(lower))
        magnitudes = x.index_select(0, candidates).abs().to(precise_dtype(x))
    return candidates.index_select(0, _exactly(magnitudes, k, upper, lower, place))


def _bisect(
    magnitudes: Tensor, k: int, mean: Tensor, most: Tensor, floor: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the least threshold tried that at most k elements reach, the greatest that more do.

    Infinity and 0 if there was none. Whatever is below ``floor`` is taken to be reached by more.
    """
    low, high = mean, most
    upper, lower = torch.full_like(mean, math.inf), torch.zeros_like(mean)
    for _ in range(_ROUNDS):
        threshold = (low + high) / 2
        few = ((magnitudes >= threshold).count_nonzero() <= k) & (threshold >= floor)
        high, upper = torch.where(few, threshold, high), torch.where(few, threshold, upper)
        low, lower = torch.where(few, low, threshold), torch.where(few, lower, threshold)
    return upper, lower


def _exactly(magnitudes: Tensor, k: int, upper: Tensor, lower: Tensor, place: int) -> Tensor:
    """Return indices of what reaches ``upper`` and of a window of what reaches ``lower`` only."""
    sure = magnitudes >= upper
    band = (magnitudes >= lower).logical_and_(~sure)
    rank = band.cumsum(0, dtype=torch.int32)  # from 1
    missing = k - sure.count_nonzero()
    start = place % (rank[-1] - missing + 1)  # 0 .. what is left over, both included
    window = band.logical_and_(rank > start).logical_and_(rank <= start + missing)
    return torch.nonzero_static(sure.logical_or_(window), size=k).view(-1)

"""Passes over the magnitudes of a bucket, for compressors that send what exceeds a threshold.

On a CPU they go through the bucket piece by piece with scratch that stays in the cache, since a
temporary of the bucket's size costs more in page faults than the arithmetic does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradpilot.worker_agent.compressors._precision import precise_dtype

# Elements of a piece: 2 MB of fp32. A multiple of 8, see ``_false``.
_PIECE = 1 << 19
# Primes, so that a sample does not walk along the rows of a matrix or the taps of a filter.
_STRIDES = (97, 31, 11)
# Eight bools, all true.
_ALL = 0x0101010101010101


def least_positive(x: Tensor) -> float:
    """Return the smallest magnitude but zero in that dtype, to be a threshold that spares zeros."""
    info = torch.finfo(precise_dtype(x))
    return info.smallest_normal * info.eps


def sampled(x: Tensor, least: int) -> Tensor:
    """Return magnitudes of elements at a fixed stride, at fp32 or better.

    Args:
        x: 1-D contiguous float tensor.
        least: How many to return at least; all of fewer than 11 times as many.
    """
    stride = next((s for s in _STRIDES if x.numel() // s >= least), 1)
    return x[::stride].abs().to(precise_dtype(x))


def mean_and_largest(x: Tensor) -> tuple[float, float]:
    """Return mean and largest magnitude; not finite if an element is not, or the sum overflows.

    Args:
        x: 1-D contiguous float tensor on a CPU.
    """
    scratch = torch.empty(min(x.numel(), _PIECE), dtype=precise_dtype(x))
    starts = range(0, x.numel(), _PIECE)
    sums = [_magnitudes(x[start : start + _PIECE], scratch).sum() for start in starts]
    low, high = (float(bound) for bound in x.aminmax())
    return float(torch.stack(sums).sum(dtype=torch.float64)) / x.numel(), max(-low, high)


def above(x: Tensor, threshold: float) -> Tensor:
    """Return the indices of elements of at least this magnitude, or NaN, ascending.

    Args:
        x: 1-D contiguous float tensor.
        threshold: Compared at fp32, or fp64 for fp64; NaN selects everything.

    Returns:
        int64 tensor; its length is known to the host, which waits for the device.
    """
    threshold = min(threshold, torch.finfo(precise_dtype(x)).max)
    if x.device.type != "cpu":
        return (x.abs().to(precise_dtype(x)) < threshold).logical_not_().nonzero().view(-1)
    n = x.numel()
    scratch = torch.empty(min(n, _PIECE), dtype=precise_dtype(x))
    # Whole words of eight: bools beyond the end stay true.
    below = torch.ones(-(-scratch.numel() // 8) * 8, dtype=torch.bool)
    found = []
    for start in range(0, n, _PIECE):
        magnitudes = _magnitudes(x[start : start + _PIECE], scratch)
        if magnitudes.numel() < scratch.numel():
            below.fill_(True)
        torch.lt(magnitudes, threshold, out=below[: magnitudes.numel()])
        found.append(_false(below).add_(start))
    return torch.cat(found)


def _magnitudes(piece: Tensor, scratch: Tensor) -> Tensor:
    """Return the magnitudes of a piece in scratch."""
    out = scratch[: piece.numel()]
    if piece.dtype == out.dtype:
        return torch.abs(piece, out=out)
    return out.copy_(piece).abs_()


def _false(flags: Tensor) -> Tensor:
    """Return the indices of the false ones of many bools; twice as fast as nonzero if few are.

    Eight at once are compared as one integer, and looked at one by one only where they differ.
    """
    words = flags.view(torch.int64)
    mixed = (words != _ALL).nonzero().view(-1)
    if 4 * mixed.numel() > words.numel():
        return flags.logical_not().nonzero().view(-1)
    # index_select: many times faster than words[mixed]
    bools = words.index_select(0, mixed).view(torch.bool)
    inside = bools.logical_not_().nonzero().view(-1)
    return mixed.index_select(0, inside >> 3).mul_(8).add_(inside & 7)

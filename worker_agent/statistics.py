"""What survives: the energy curve of a gradient, the sizes of its elements, what was sent."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradpilot.protos.messages import ENERGY_RATIOS, MAGNITUDE_BINS, MAGNITUDE_LOW
from gradpilot.worker_agent.compressors._precision import squared_norm
from gradpilot.worker_agent.compressors.sent import Sent

__all__ = ["SAMPLE_ELEMENTS", "energy_curve", "gain", "magnitudes", "squared_norm"]

SAMPLE_ELEMENTS = 1 << 16
"""Elements that an energy curve looks at: a sort of so many takes about 3 ms on one core."""


def energy_curve(gradient: Tensor) -> tuple[float, ...]:
    """Return the share of ||gradient||^2 in its largest elements, at ``ENERGY_RATIOS``.

    One sort gives the gain of top-k for all ratios at once, so no training step is spent on trying
    them. Large buckets are sampled with an odd stride, which walks through all rows and columns of
    a matrix of even width.

    Args:
        gradient: 1-D; not changed.

    Returns:
        Non-decreasing values in [0, 1]; empty if the gradient is zero or not finite.
    """
    stride = max(gradient.numel() // SAMPLE_ELEMENTS, 1) | 1
    energy = gradient[::stride].float().square()
    cumulative = energy.sort(descending=True).values.double().cumsum(0)
    total = float(cumulative[-1])
    if not (math.isfinite(total) and total > 0.0):
        return ()
    n = cumulative.numel()
    # At least one element is always kept, as compressors do.
    last = torch.tensor([max(int(ratio * n), 1) - 1 for ratio in ENERGY_RATIOS])
    shares = (cumulative[last.to(cumulative.device)] / total).clamp_(0.0, 1.0)
    return tuple(shares.tolist())


def magnitudes(gradient: Tensor) -> tuple[int, ...]:
    """Return how many sampled elements have a magnitude in each of ``MAGNITUDE_BINS`` octaves.

    Read from the exponents of the floats, so it needs no logarithm; sampled as ``energy_curve``.

    Args:
        gradient: 1-D; not changed.

    Returns:
        Counts from small to large, the outer bins with what lies beyond them; empty if the gradient
        is not finite.
    """
    stride = max(gradient.numel() // SAMPLE_ELEMENTS, 1) | 1
    sample = gradient[::stride].float().contiguous()
    exponents = sample.view(torch.int32).bitwise_right_shift(23).bitwise_and_(0xFF)
    if int(exponents.max()) == 0xFF:
        return ()
    bins = exponents.sub_(127 + MAGNITUDE_LOW).clamp_(0, MAGNITUDE_BINS - 1)
    return tuple(torch.bincount(bins, minlength=MAGNITUDE_BINS).tolist())


def gain(sent: Tensor | Sent | None, corrected_sq: float) -> float:
    """Return ||sent||^2 / ||corrected||^2 (the squared form), 1 if all was sent.

    Args:
        sent: As in ``Estimate``.
        corrected_sq: ||corrected||^2; with 0 there is nothing to lose and the gain is 1.
    """
    if sent is None or corrected_sq == 0.0:
        return 1.0
    sent_sq = sent.squared_norm() if isinstance(sent, Sent) else squared_norm(sent)
    return min(sent_sq / corrected_sq, 1.0)

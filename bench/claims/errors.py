"""Errors of an estimated mean gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mean_of(grads: Sequence[Tensor]) -> Tensor:
    """Return the true mean gradient, in float64."""
    return torch.stack(list(grads)).double().mean(0)


def vnmse(estimate: Tensor, mean: Tensor) -> float:
    """Return ||estimate - mean||^2 / ||mean||^2; 0 is exact, 1 like sending nothing.

    Args:
        estimate: Any float dtype.
        mean: The true mean gradient.
    """
    true = mean.double()
    return float((estimate.double() - true).square().sum() / true.square().sum())

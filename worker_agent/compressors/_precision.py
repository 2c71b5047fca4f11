"""The dtype to compute in, shared by all compressors."""

from __future__ import annotations

import torch
from torch import Tensor


def precise_dtype(x: Tensor) -> torch.dtype:
    """Return the tensor's own dtype, float32 at least: 16 bits would round every operation."""
    return torch.promote_types(x.dtype, torch.float32)


def squared_norm(tensor: Tensor) -> float:
    """Return ||tensor||^2, added up in float64; not changed."""
    # A float32 dot product of 10^7 elements is off by 1e-4; gains near 1 need better.
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2

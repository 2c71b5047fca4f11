"""The dtype to compute in, shared by all compressors."""

from __future__ import annotations

import torch
from torch import Tensor


def precise_dtype(x: Tensor) -> torch.dtype:
    """Return the tensor's own dtype, float32 at least: 16 bits would round every operation."""
    return torch.promote_types(x.dtype, torch.float32)

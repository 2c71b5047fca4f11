"""Whether a gradient is finite, and how one that is not is made so everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite, mostly in one pass and without temporaries."""
    if bool(torch.isfinite(tensor.sum(dtype=_wide(tensor.dtype)))):
        return True
    # The sum of finite values can overflow: look at each.
    return bool(torch.isfinite(tensor).all())


def poison_(corrected: Tensor) -> None:
    """Turn a gradient with a non-finite element into NaN everywhere.

    Then whatever a compressor selects is non-finite, and so is the mean on every rank.
    """
    if not is_finite(corrected):
        corrected.fill_(float("nan"))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def finite_flag(tensor: Tensor) -> Tensor:
    """Return ``is_finite`` as a 0-d tensor on its device, without making the host wait for that."""
    if tensor.device.type == "cpu":
        return torch.tensor(is_finite(tensor))
    return torch.isfinite(tensor).all()


def poison_without_waiting_(corrected: Tensor) -> None:
    """Do as ``poison_`` without making the host wait for the device; a pass more on CUDA."""
    if corrected.device.type == "cpu":
        poison_(corrected)
    else:
        corrected.masked_fill_(torch.isfinite(corrected).all().logical_not(), float("nan"))

"""What compressors share whose ranks agree on where to send: one all-reduce of the values there.

Letters: N world size, n elements of the bucket, k kept elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradpilot.worker_agent.compressors._sixteen_bit import sixteen_bit_rounds
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.compressors.none import dense_rounds
from gradpilot.worker_agent.compressors.sent import Sparse, dense_sent
from gradpilot.worker_agent.compressors.settings import choice

_SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wire_format(default: str) -> Any:
    """Return a field for how values travel: ``fp32`` as they are, or cast to ``bf16``, ``fp16``."""
    return choice(default, *(w for w in ("fp32", "bf16", "fp16") if w != default))


def element_bytes(wire: str) -> int:
    """Return the bytes of one fp32 value on the wire."""
    return 2 if wire in _SIXTEEN_BITS else 4


def values_rounds(values: Tensor, at: At, wire: str) -> Rounds:
    """Average values over ranks by one all-reduce; mean and sent part have their length.

    Args:
        values: 1-D, same numel and dtype on all ranks; overwritten unless ``at.feedback``.
        at: Where this takes place.
        wire: See ``wire_format``.
    """
    if wire in _SIXTEEN_BITS:
        return sixteen_bit_rounds(values, at, _SIXTEEN_BITS[wire])
    return dense_rounds(values, at)


def places_rounds(grad: Tensor, indices: Tensor, at: At, wire: str = "fp32") -> Rounds:
    """Average the elements at ``indices`` over ranks; elsewhere the mean is zero.

    Args:
        grad: Gradient of one bucket; overwritten unless ``at.feedback``.
        indices: Unique, int64, the same on all ranks.
        at: Where this takes place.
        wire: See ``wire_format``.
    """
    values = grad.index_select(0, indices)
    part = yield from values_rounds(values, at.within(), wire)
    mean = at.room(grad).zero_().index_copy_(0, indices, part.mean)
    return Estimate(mean, Sparse(indices, dense_sent(part.sent, values)) if at.feedback else None)

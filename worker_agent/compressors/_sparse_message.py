"""Exchange of selected elements: one message of values and indices from every rank.

Letters: N world size, n elements of the bucket, k selected elements.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gradpilot.worker_agent.collectives.base import AllGather
from gradpilot.worker_agent.collectives.gather import gather_unequal
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.compressors.sent import Sparse


def average_selected(grad: Tensor, indices: Tensor, at: At) -> Rounds:
    """Gather the selected elements of all ranks; the mean is their sum over N.

    One round of k values in the dtype of the gradient and k int32 indices: 8k bytes of fp32. To be
    used with ``yield from``.

    Args:
        grad: What to select from, 1-D; overwritten if ``at.feedback`` is False.
        indices: int64 and unique, the same number k on all ranks.
        at: Where this takes place.
    """
    message = pack(grad.index_select(0, indices), indices)
    del indices  # at 10 % a fifth of a bucket, which the message tells in half of that
    gathered = yield AllGather(message)
    parts, places = unpack(gathered, grad.dtype)
    mean = _mean(grad, zip(parts, places, strict=True), at)
    return Estimate(mean, _sent(message, grad, at))


def average_unequal(grad: Tensor, indices: Tensor, at: At) -> Rounds:
    """Do as ``average_selected`` where ranks select different numbers of elements, or none.

    Two rounds: lengths (8 bytes), then messages as long as the longest. The second does not take
    place if no rank selected anything.
    """
    message = pack(grad.index_select(0, indices), indices)
    del indices
    messages = yield from gather_unequal(message)
    mean = _mean(grad, (unpack(each, grad.dtype) for each in messages), at)
    return Estimate(mean, _sent(message, grad, at))


def pack(values: Tensor, indices: Tensor) -> Tensor:
    """Lay k values and k indices into one uint8 tensor, the wider of the two first."""
    k, size = values.numel(), values.element_size()
    message = torch.empty(k * (size + 4), dtype=torch.uint8, device=values.device)
    value_part, index_part = _split(message, size)
    value_part.view(values.dtype).copy_(values)
    index_part.view(torch.int32).copy_(indices)
    return message


def unpack(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the values and int32 indices of one message, or ``(N, k)`` of each of N equal ones.

    Views of the message where alignment permits; for fp32 it always does.
    """
    value_part, index_part = _split(message, dtype.itemsize)
    return _view(value_part, dtype), _view(index_part, torch.int32)


def _split(message: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of the values, of ``size`` bytes each, and those of the indices."""
    k = message.shape[-1] // (size + 4)
    head, tail = message[..., : k * max(size, 4)], message[..., k * max(size, 4) :]
    return (head, tail) if size >= 4 else (tail, head)


def _view(part: Tensor, dtype: torch.dtype) -> Tensor:
    # An odd number of elements of 2 or 8 bytes shifts the message of the next rank.
    places = (part.storage_offset(), *part.stride()[:-1])
    if any(place % dtype.itemsize for place in places):
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(dtype)


def _sent(message: Tensor, grad: Tensor, at: At) -> Sparse | None:
    if not at.feedback:
        return None
    values, indices = unpack(message, grad.dtype)
    return Sparse(indices, values)


def _mean(grad: Tensor, parts: Iterable[tuple[Tensor, Tensor]], at: At) -> Tensor:
    """Return the mean of what ranks selected, values and int32 indices of each."""
    # At fp32 or better: 16 bits would round N times.
    precise = precise_dtype(grad)
    room = at.room(grad)
    total = room if room.dtype == precise else torch.empty_like(room, dtype=precise)
    total.zero_()
    for values, places in parts:  # rank by rank: indices within one are unique
        # Divided before the sum: k N elements instead of n.
        total.index_add_(0, places, values.to(precise) / at.world_size)
    return total if total is room else room.copy_(total)

"""All-gather of payloads whose length differs between ranks."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from gradpilot.worker_agent.collectives.base import AllGather, Collective


def gather_unequal(payload: Tensor) -> Generator[Collective, Tensor, list[Tensor]]:
    """Collect ``payload`` of every rank; to be used with ``yield from``.

    Two rounds: lengths (8 bytes), then payloads padded to the longest, which is what backends carry
    best. Without any element only the first takes
    place, on all ranks alike. Reading the lengths makes the host wait for the device.

    Args:
        payload: 1-D contiguous tensor of any length, same dtype on all ranks.

    Returns:
        The payload of every rank, as views.
    """
    length = torch.tensor([payload.numel()], dtype=torch.int64, device=payload.device)
    gathered = yield AllGather(length)
    lengths = [int(n) for n in gathered.view(-1).tolist()]
    longest = max(lengths)
    if longest == 0:
        return [payload] * len(lengths)
    padded = payload
    if payload.numel() < longest:
        padded = payload.new_zeros(longest)
        padded[: payload.numel()] = payload
    parts = yield AllGather(padded)
    return [part[:n] for part, n in zip(parts, lengths, strict=True)]

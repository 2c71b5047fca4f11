"""Stand-ins for what DDP hands to a hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket


class _FakeBucket:
    """A bucket over some parameters, laid out one after the other."""

    def __init__(
        self, parameters: Sequence[Tensor], index: int = 0, *, last: bool = True, gap: int = 0
    ) -> None:
        self._parameters = list(parameters)
        self._index, self._last = index, last
        self._buffer = torch.zeros(sum(p.numel() for p in parameters) + gap)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        views, start = [], 0
        for p in self._parameters:
            views.append(self._buffer[start : start + p.numel()].view(p.shape))
            start += p.numel()
        return views


def fake_bucket(
    parameters: Sequence[Tensor], index: int = 0, *, last: bool = True, gap: int = 0
) -> GradBucket:
    """Return what passes for a bucket of DDP's, whose own class cannot be made in Python."""
    return cast(GradBucket, _FakeBucket(parameters, index, last=last, gap=gap))


def named(sizes: Sequence[int]) -> dict[str, Tensor]:
    """Return parameters p0, p1, ... of these sizes."""
    return {f"p{i}": torch.zeros(size) for i, size in enumerate(sizes)}

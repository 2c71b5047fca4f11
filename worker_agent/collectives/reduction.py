"""How two payloads of an all-reduce combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reduction:
    """An associative combination, or one whose order of application is part of the definition.

    Attributes:
        name: For messages and logs.
        combine_: Combines the second payload into the first, in place; elementwise, so that it may
            be applied to any part. Both have the dtype of the request.
        native: Whether the backend has it.
    """

    name: str
    combine_: Callable[[Tensor, Tensor], Tensor]
    native: bool


def _maximum_(target: Tensor, incoming: Tensor) -> Tensor:
    return torch.maximum(target, incoming, out=target)


SUM = Reduction("sum", Tensor.add_, native=True)
MAX = Reduction("max", _maximum_, native=True)
"""Of a NaN no backend promises anything: hand in infinity instead."""

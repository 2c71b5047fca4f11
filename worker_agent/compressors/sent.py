"""What a rank sent of its corrected gradient, in the form in which the compressor has it.

A dense copy would be a bucket of fresh memory, whose page faults cost more than the arithmetic, and
which is read once, to be subtracted. So compressors hand over what they have anyway, such as codes,
and that is decoded piece by piece when the residual is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradpilot.worker_agent.compressors._precision import precise_dtype, squared_norm

# 512 KB of fp32, which stays in the cache.
_PART = 1 << 17


class Sent(ABC):
    """A vector of n elements that is only ever subtracted, or measured."""

    @abstractmethod
    def subtract_from_(self, vector: Tensor) -> Tensor:
        """Subtract it from a dense vector of n elements in place, and return that."""

    @abstractmethod
    def squared_norm(self) -> float:
        """Return its squared norm, added up in float64."""

    def dense(self, like: Tensor) -> Tensor:
        """Return it as a new tensor shaped as ``like``, at fp32 or better."""
        return self.subtract_from_(torch.zeros_like(like, dtype=precise_dtype(like))).neg_()


@dataclass(frozen=True, slots=True)
class Sparse(Sent):
    """A vector that is zero but for ``values`` at unique ``indices`` (int32 or int64)."""

    indices: Tensor
    values: Tensor

    def subtract_from_(self, vector: Tensor) -> Tensor:
        """See ``Sent``."""
        return vector.index_add_(0, self.indices, self.values.to(vector.dtype), alpha=-1)

    def squared_norm(self) -> float:
        """See ``Sent``."""
        return squared_norm(self.values)


@dataclass(frozen=True, slots=True)
class Pieces(Sent):
    """A vector that is made piece by piece each time it is needed.

    Attributes:
        make: Begins a new pass: yields where a piece lies, and its elements, of any float dtype,
            which are valid until the next piece is asked for. Pieces do not overlap; what none of
            them covers is zero.
    """

    make: Callable[[], Iterator[tuple[slice, Tensor]]]

    def subtract_from_(self, vector: Tensor) -> Tensor:
        """See ``Sent``."""
        for where, values in self.make():
            vector[where].sub_(values)
        return vector

    def squared_norm(self) -> float:
        """See ``Sent``."""
        return sum(squared_norm(values) for _, values in self.make())


def dense_sent(sent: Tensor | Sent | None, corrected: Tensor) -> Tensor:
    """Return what was sent as a dense tensor.

    Args:
        sent: As in ``Estimate``.
        corrected: What it was sent of, before that became the residual.
    """
    if sent is None:
        return corrected
    return sent.dense(corrected) if isinstance(sent, Sent) else sent


def cuts(n: int, device: torch.device) -> Iterator[slice]:
    """Yield consecutive ranges of n elements to work on at a time, small enough for the cache.

    One range on devices that run kernels asynchronously: few kernels serve those best.
    """
    step = _PART if device.type == "cpu" else max(n, 1)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def cut_length(n: int, device: torch.device) -> int:
    """Return the length of the longest of ``cuts``."""
    return min(_PART, n) if device.type == "cpu" else n

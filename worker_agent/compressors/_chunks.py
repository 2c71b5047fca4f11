"""A gradient as chunks of equal length: their energies, and the values of chosen ones.

Everything works on rows of contiguous elements, 3 to 20 times faster than on single elements, and
without asking the device for a number. The last chunk may be short; its place in a payload is
padded, so that the payload's length never depends on which chunks were chosen.

Letters: n elements of the bucket, C elements of a chunk, J chosen chunks.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gradpilot.worker_agent.compressors._agreed import values_rounds
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors._select import largest
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds, Sparse


def chunk_count(n: int, size: int) -> int:
    """Return how many chunks n elements make, the short last one included."""
    return -(-n // size)


def chunk_energies(grad: Tensor, size: int) -> Tensor:
    """Return the sum of squares of every chunk, fp32; one pass over ``grad``, no temporary.

    Args:
        grad: 1-D contiguous.
        size: Elements C of a chunk.
    """
    full = grad.numel() // size
    precise = precise_dtype(grad)
    norms = grad.new_empty(chunk_count(grad.numel(), size), dtype=precise)
    # Norms that are squared again: unlike the sum of squares, they are one fused pass.
    rows = grad[: full * size].view(full, size)
    torch.linalg.vector_norm(rows, dim=1, dtype=precise, out=norms[:full])
    if full < norms.numel():
        norms[full] = torch.linalg.vector_norm(grad[full * size :], dtype=precise)
    return norms.square_().float()


def leading(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` largest scores, ascending, int64.

    Of equal scores the lower index is taken. Scores must not be negative.
    """
    if scores.device.type == "cpu":
        return largest(scores, count)
    # An accelerator sorts in less time than it takes to tell the host how many scores tie.
    order = scores.sort(descending=True, stable=True).indices
    return order[:count].sort().values


class Chosen:
    """J of the chunks of a vector, not all of them.

    The padding of a short last chunk takes the place of elements of a chunk that was not chosen, so
    that every element of a payload has an index of its own; its value is zero.

    Args:
        n: Elements of the vector.
        size: Elements C of a chunk.
        numbers: Numbers of the chosen chunks, ascending, int64.
    """

    def __init__(self, n: int, size: int, numbers: Tensor) -> None:
        self._size = size
        self._full = n // size
        self._tail = n - self._full * size
        self._rows = numbers
        if self._tail:
            self._short = numbers[-1] == self._full
            # Ascending numbers equal their positions up to the first one left out.
            spare = (numbers == torch.arange(len(numbers), device=numbers.device)).sum()
            self._rows = numbers.clone()
            self._rows[-1] = torch.where(self._short, spare, numbers[-1])

    def gather(self, grad: Tensor) -> Tensor:
        """Return the chosen chunks of a vector, J C elements."""
        values = self._view(grad).index_select(0, self._rows)
        if self._tail:
            # Zeros, but NaN where the gradient is poisoned: a ring that skips steps may ask a rank
            # for its padding alone.
            padding = (grad[:1] * 0).expand(self._size - self._tail)
            short = torch.cat([grad[-self._tail :], padding])
            values[-1] = torch.where(self._short, short, values[-1])
        return values.view(-1)

    def scatter_(self, values: Tensor, out: Tensor) -> Tensor:
        """Write J C values into the chosen chunks of ``out``, which is zero, and return it."""
        rows, into = values.view(-1, self._size), self._view(out)
        if not self._tail:
            into.index_copy_(0, self._rows, rows)
            return out
        last = rows[-1:]
        zero = torch.zeros_like(last)
        into.index_copy_(0, self._rows[:-1], rows[:-1])
        into.index_copy_(0, self._rows[-1:], torch.where(self._short, zero, last))
        out[-self._tail :] = torch.where(self._short, last, zero)[0, : self._tail]
        return out

    @cached_property
    def indices(self) -> Tensor:
        """Return the index of every element of a payload, unique, int64."""
        within = torch.arange(self._size, device=self._rows.device)
        indices = (self._rows[:, None] * self._size + within).view(-1)
        if self._tail:
            part = indices[-self._size :][: self._tail]
            tail = within[: self._tail] + self._full * self._size
            part.copy_(torch.where(self._short, tail, part))
        return indices

    def _view(self, vector: Tensor) -> Tensor:
        return vector[: self._full * self._size].view(self._full, self._size)


def chosen_rounds(grad: Tensor, chosen: Chosen, at: At, wire: str) -> Rounds:
    """Average the chosen chunks over ranks; elsewhere the mean is zero.

    Args:
        grad: Gradient of one bucket; overwritten unless ``at.feedback``.
        chosen: The same chunks on all ranks.
        at: Where this takes place.
        wire: See ``_agreed.wire_format``.
    """
    values = chosen.gather(grad)
    part = yield from values_rounds(values, at, wire)
    if not at.feedback:
        return Estimate(chosen.scatter_(part.mean, grad.zero_()), None)
    sent = values if part.sent is None else part.sent
    assert isinstance(sent, Tensor)
    mean = chosen.scatter_(part.mean, torch.zeros_like(grad))
    return Estimate(mean, Sparse(chosen.indices, sent))

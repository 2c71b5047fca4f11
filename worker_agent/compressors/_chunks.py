"""A gradient as chunks of equal length: their energies, and the values of chosen ones.

Everything works on rows of contiguous elements, 3 to 20 times faster than on single elements, and
without asking the device for a number. The last chunk may be short; its place in a payload is
padded, so that the payload's length never depends on which chunks were chosen.

Letters: n elements of the bucket, C elements of a chunk, J chosen chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradpilot.worker_agent.compressors._agreed import values_rounds
from gradpilot.worker_agent.compressors._precision import precise_dtype, squared_norm
from gradpilot.worker_agent.compressors._select import largest
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.compressors.sent import Sent, dense_sent


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

    A short last chunk lies in no row of whole chunks. If it is chosen, zeros go to a row that was
    not, and its elements are treated apart, so that no number has to be known on the host.

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
        into = self._view(out)
        for numbers, rows in self._rows_of(values):
            into.index_copy_(0, numbers, rows)
        if self._tail:
            out[-self._tail :] = self._short_of(values)
        return out

    def subtract_(self, values: Tensor, out: Tensor) -> Tensor:
        """Subtract J C values, of the same dtype, from the chosen chunks of ``out``; return it."""
        into = self._view(out)
        for numbers, rows in self._rows_of(values):
            into.index_add_(0, numbers, rows, alpha=-1)
        if self._tail:
            out[-self._tail :].sub_(self._short_of(values))
        return out

    def _rows_of(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield row numbers and their values, zeros for the row in the short chunk's place."""
        rows = values.view(-1, self._size)
        if not self._tail:
            yield self._rows, rows
            return
        last = rows[-1:]
        yield self._rows[:-1], rows[:-1]
        yield self._rows[-1:], torch.where(self._short, torch.zeros_like(last), last)

    def _short_of(self, values: Tensor) -> Tensor:
        """Return the elements of the short last chunk, zeros if it was not chosen."""
        last = values[-self._size :][: self._tail]
        return torch.where(self._short, last, torch.zeros_like(last))

    def _view(self, vector: Tensor) -> Tensor:
        return vector[: self._full * self._size].view(self._full, self._size)


@dataclass(frozen=True, slots=True)
class Chunks(Sent):
    """A vector that is zero but for the values of chosen chunks."""

    chosen: Chosen
    values: Tensor

    def subtract_from_(self, vector: Tensor) -> Tensor:
        """See ``Sent``."""
        return self.chosen.subtract_(self.values.to(vector.dtype), vector)

    def squared_norm(self) -> float:
        """See ``Sent``."""
        return squared_norm(self.values)


def chosen_rounds(grad: Tensor, chosen: Chosen, at: At, wire: str) -> Rounds:
    """Average the chosen chunks over ranks; elsewhere the mean is zero.

    Args:
        grad: Gradient of one bucket; overwritten unless ``at.feedback``.
        chosen: The same chunks on all ranks.
        at: Where this takes place.
        wire: See ``_agreed.wire_format``.
    """
    values = chosen.gather(grad)
    part = yield from values_rounds(values, at.within(), wire)
    mean = chosen.scatter_(part.mean, at.room(grad).zero_())
    if not at.feedback:
        return Estimate(mean, None)
    return Estimate(mean, Chunks(chosen, dense_sent(part.sent, values)))

"""The matrices of a bucket and their products with factors of low rank.

A matrix has a shorter and a longer side, s and l. A factor of a side stores one direction a row,
``(r, s)`` or ``(r, l)``: products with a row-major matrix are then made of long contiguous runs.
Measured on one thread with r = 4 and 1e7 elements in matrices of 2500 x 4000: 4 ms for either
product this way, 12 and 16 to 45 ms with one direction a column.

Letters: s and l shorter and longer side, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradpilot.errors import ConfigError

SHORT, LONG = "short", "long"

# Elements of a product that are computed together: they stay in the cache. One thread, r = 4, 1e7
# elements: 8 to 12 ms at once, 3 to 4 ms in blocks.
_BLOCK_ELEMENTS = 1 << 17


def other(side: str) -> str:
    """Return the other side."""
    return LONG if side == SHORT else SHORT


@dataclass(frozen=True, slots=True)
class Group:
    """The matrices of one shape within a bucket.

    Attributes:
        rows: Their rows.
        columns: Their columns, all dimensions but the first.
        rank: Rank r of their factors, at most the shorter side.
        positions: Their parameters' positions in the bucket.
        starts: Where they begin in the bucket, in elements.
    """

    rows: int
    columns: int
    rank: int
    positions: tuple[int, ...]
    starts: tuple[int, ...]

    def length(self, side: str) -> int:
        """Return the length of a side."""
        return min(self.rows, self.columns) if side == SHORT else max(self.rows, self.columns)

    def project_(self, bucket: Tensor, factor: Tensor, side: str, out: Tensor) -> None:
        """Write to ``out`` the factor of the other side: every matrix times its factor.

        Args:
            bucket: 1-D, holds the matrices.
            factor: ``(matrices, r, length of side)``.
            side: Side of ``factor``.
            out: ``(matrices, r, length of the other side)``, contiguous.
        """
        for number, start in enumerate(self.starts):
            matrix = self._matrix(bucket, start)
            if (side == LONG) == (self.rows <= self.columns):
                matrix = matrix.T
            torch.mm(factor[number], matrix, out=out[number])

    def compose_(self, factor: Tensor, coordinates: Tensor, side: str, out: Tensor) -> None:
        """Write the matrices that two factors make into a bucket.

        Args:
            factor: Factor of ``side``.
            coordinates: Factor of the other side.
            side: Side of ``factor``.
            out: 1-D bucket; elements beside these matrices are left alone.
        """
        left, right = self._sides(factor, coordinates, side)
        for number, start in enumerate(self.starts):
            _outer_(left[number].T, right[number], self._matrix(out, start))

    def pieces(
        self, factor: Tensor, coordinates: Tensor, side: str
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield where in the bucket a few rows lie, and their elements, valid until the next.

        See ``compose_``, which is faster where a whole bucket is wanted.
        """
        left, right = self._sides(factor, coordinates, side)
        step = max(1, _BLOCK_ELEMENTS // self.columns) if left.device.type == "cpu" else self.rows
        scratch = left.new_empty(min(step, self.rows), self.columns)
        for number, start in enumerate(self.starts):
            for first in range(0, self.rows, step):
                part = left[number, :, first : first + step].T
                rows = torch.mm(part, right[number], out=scratch[: len(part)])
                at = start + first * self.columns
                yield slice(at, at + rows.numel()), rows.view(-1)

    def _sides(self, factor: Tensor, coordinates: Tensor, side: str) -> tuple[Tensor, Tensor]:
        """Return the factors of rows and of columns."""
        short, long = (factor, coordinates) if side == SHORT else (coordinates, factor)
        return (short, long) if self.rows <= self.columns else (long, short)

    def _matrix(self, bucket: Tensor, start: int) -> Tensor:
        return bucket[start : start + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Layout:
    """What of a bucket is compressed, and what is not.

    Attributes:
        groups: Matrices that are compressed, by shape.
        vectors: The rest, as ranges of the bucket.
    """

    groups: tuple[Group, ...]
    vectors: tuple[slice, ...]

    def elements(self, side: str) -> int:
        """Return the elements of all factors of a side."""
        return sum(len(g.positions) * g.rank * g.length(side) for g in self.groups)

    @property
    def vector_elements(self) -> int:
        """Return the elements that are not compressed."""
        return sum(part.stop - part.start for part in self.vectors)

    def factors(self, flat: Tensor, side: str) -> Iterator[tuple[Group, Tensor]]:
        """Yield every group with its ``(matrices, r, length)`` part of a flat tensor, as a view."""
        start = 0
        for group in self.groups:
            shape = (len(group.positions), group.rank, group.length(side))
            stop = start + math.prod(shape)
            yield group, flat[start:stop].view(shape)
            start = stop

    def pack_vectors_(self, bucket: Tensor, flat: Tensor) -> None:
        """Copy what is not compressed from a bucket into a flat tensor."""
        start = 0
        for part in self.vectors:
            stop = start + part.stop - part.start
            flat[start:stop] = bucket[part]
            start = stop

    def vector_pieces(self, flat: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield where in a bucket a piece of what is not compressed lies, and its elements."""
        start = 0
        for part in self.vectors:
            stop = start + part.stop - part.start
            yield part, flat[start:stop]
            start = stop


# A run has as many layouts as buckets, times the ranks that were tried.
@lru_cache(maxsize=256)
def layout_of(
    n: int, shapes: tuple[torch.Size, ...], rank: int, min_saving: float, share: float
) -> Layout:
    """Return what of a bucket is worth compressing.

    Args:
        n: Elements of the bucket.
        shapes: Shapes of its parameters in buffer order; none means one vector.
        rank: Rank of the factors, before it is limited to the shorter side.
        min_saving: Elements of a matrix for each element sent, below which it is not compressed.
        share: Share of both factors that one step sends, on average.

    Raises:
        ConfigError: The shapes do not fill the bucket.
    """
    if shapes and sum(math.prod(shape) for shape in shapes) != n:
        raise ConfigError(f"shapes {[tuple(s) for s in shapes]} do not fill a bucket of {n}")
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    vectors: list[slice] = []
    start = 0
    for position, shape in enumerate(shapes or (torch.Size([n]),)):
        size = math.prod(shape)
        rows = shape[0] if shape else 1
        columns = size // max(rows, 1)
        sent = share * min(rank, rows, columns) * (rows + columns)
        if len(shape) >= 2 and size > 0 and size >= min_saving * sent:
            found.setdefault((rows, columns), []).append((position, start))
        elif vectors and vectors[-1].stop == start:
            vectors[-1] = slice(vectors[-1].start, start + size)
        else:
            vectors.append(slice(start, start + size))
        start += size
    groups = (
        Group(
            rows,
            columns,
            min(rank, rows, columns),
            tuple(position for position, _ in members),
            tuple(start for _, start in members),
        )
        for (rows, columns), members in found.items()
    )
    return Layout(tuple(groups), tuple(vectors))


def _outer_(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write ``left @ right``, ``(rows, r)`` by ``(r, columns)``, into ``out``."""
    rows, columns = out.shape
    block = max(1, _BLOCK_ELEMENTS // columns)
    whole = rows // block * block
    if out.device.type != "cpu" or whole <= block:
        torch.mm(left, right, out=out)
        return
    blocks = whole // block
    torch.bmm(
        left[:whole].view(blocks, block, -1),
        right.expand(blocks, *right.shape),
        out=out[:whole].view(blocks, block, columns),
    )
    if whole < rows:
        torch.mm(left[whole:], right, out=out[whole:])

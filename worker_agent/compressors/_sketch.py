"""Count sketch of a long vector (Charikar et al. 2002), by rotated blocks.

A sketch has R rows of W columns. Row r adds up the elements that it puts into the same column, each
with a sign, so that an element is read back as its column times its sign, up to what else lies
there; the median over rows ignores a row in which something large does. Sketches of a sum are the
sum of sketches.

Usually a hash gives every element a column. Here the vector is cut into blocks of W elements, and
each row rotates every block by an offset and multiplies it by a sign of its own, both random. Two
elements of a block never meet; two of different blocks meet in a row with probability 1/W,
independently in every row, and with random signs: for each element the guarantee is that of
pairwise independent hashes. But memory is read and written in order and no hash is computed, which
makes it several times faster, and no two threads add to one column, so that accelerators
give the same bits every time.

Letters: n elements of the vector, R rows, W columns, B = ceil(n/W) blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Elements worked on at a time, 2 MB of fp32: scratch that stays in the cache.
_GROUP_ELEMENTS = 1 << 19
# Columns from which on a rotated block is dealt with as two slices, without a copy: so long that
# the calls for each block cost nothing beside it. Shorter blocks are rotated many at a time.
_LONG = 1 << 17


class CountSketch:
    """The shape of a sketch and its random choices; ranks with alike generators are alike.

    Args:
        n: Elements of the vectors.
        rows: Rows R, odd.
        columns: Columns W, 1 .. n.
        generator: Of the host, so that every type of device gets the same choices.
        device: Where vectors are.
    """

    def __init__(
        self, n: int, rows: int, columns: int, generator: torch.Generator, device: torch.device
    ) -> None:
        self.n = n
        self.rows = rows
        self.columns = columns
        shape = (rows, -(-n // columns))
        offsets = torch.randint(columns, shape, generator=generator)
        signs = torch.randint(2, shape, generator=generator).mul_(2).sub_(1).float()
        self._offsets = offsets.to(device)
        if columns >= _LONG:
            self._on_host = list(zip(offsets.tolist(), signs.int().tolist(), strict=True))
        self._signs = signs.to(device)

    def sketch(self, x: Tensor) -> Tensor:
        """Return the sketch of a vector, ``(R, W)`` fp32."""
        total = torch.zeros(self.rows, self.columns, device=x.device)
        if self.columns >= _LONG:
            self._add_long(x, total)
            return total
        for part, blocks in self._groups():
            # Twice in a row, so that a rotated block is W contiguous elements.
            values = self._blocks(x[part])
            windows = torch.cat([values, values], dim=1).unfold(1, self.columns, 1)
            numbers = torch.arange(len(values), device=x.device)
            for row in range(self.rows):
                rotated = windows[numbers, self._offsets[row, blocks]]
                total[row] += rotated.mul_(self._signs[row, blocks, None]).sum(0)
        return total

    def estimate(self, sketch: Tensor, out: Tensor) -> Tensor:
        """Write the vector that a sketch stands for, by median of rows, to ``out`` and return it.

        Args:
            sketch: ``(R, W)`` fp32.
            out: n elements fp32.
        """
        if self.columns >= _LONG:
            self._read_long(sketch, out)
            return out
        windows = [torch.cat([row, row]).unfold(0, self.columns, 1) for row in sketch]
        for part, blocks in self._groups():
            # Rotated back: column c of block p lies at c - offset.
            back = (self.columns - self._offsets[:, blocks]) % self.columns
            guesses = [
                windows[row][back[row]].mul_(self._signs[row, blocks, None])
                for row in range(self.rows)
            ]
            out[part] = median(guesses).view(-1)[: part.stop - part.start]
        return out

    def _add_long(self, x: Tensor, total: Tensor) -> None:
        """Add a vector to a sketch block by block."""
        for block, start in enumerate(range(0, self.n, self.columns)):
            values = x[start : start + self.columns].float()
            for row, (offsets, signs) in zip(total, self._on_host, strict=True):
                # Column c goes to c - offset; those below it come out at the far end.
                split = min(offsets[block], len(values))
                far = self.columns - offsets[block]
                row[far : far + split].add_(values[:split], alpha=signs[block])
                row[: len(values) - split].add_(values[split:], alpha=signs[block])

    def _read_long(self, sketch: Tensor, out: Tensor) -> None:
        """Read a vector from a sketch, a piece of a block at a time."""
        for block, start in enumerate(range(0, self.n, self.columns)):
            length = min(self.columns, self.n - start)
            for first in range(0, length, _GROUP_ELEMENTS):
                stop = min(first + _GROUP_ELEMENTS, length)
                guesses = []
                for row, (offsets, signs) in zip(sketch, self._on_host, strict=True):
                    offset = offsets[block]
                    split = min(max(offset, first), stop)
                    far = self.columns - offset
                    parts = (row[far + first : far + split], row[split - offset : stop - offset])
                    guesses.append(torch.cat(parts).mul_(signs[block]))
                out[start + first : start + stop] = median(guesses)

    def _groups(self) -> Iterator[tuple[slice, slice]]:
        """Yield elements and blocks to work on at a time."""
        step = max(1, _GROUP_ELEMENTS // self.columns)
        for first in range(0, self._offsets.shape[1], step):
            start, stop = first * self.columns, min((first + step) * self.columns, self.n)
            yield slice(start, stop), slice(first, first + -(-(stop - start) // self.columns))

    def _blocks(self, values: Tensor) -> Tensor:
        missing = -values.numel() % self.columns
        return torch.nn.functional.pad(values.float(), (0, missing)).view(-1, self.columns)


def median(values: Sequence[Tensor]) -> Tensor:
    """Return the elementwise median of an odd number of tensors, whose contents it spoils.

    Keeps just enough of them that neither the least nor the greatest can be the median, drops
    those two, takes in the next, and so on. NaN anywhere gives NaN.
    """
    count = len(values) // 2 + 2
    held, waiting = list(values[:count]), list(values[count:])
    while len(held) > 1:
        for i in range(1, len(held)):
            held[0], held[i] = _order(held[0], held[i])
        for i in range(1, len(held) - 1):
            held[i], held[-1] = _order(held[i], held[-1])
        held = held[1:-1] + waiting[:1]
        del waiting[:1]
    return held[0]


def _order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lesser and the greater; ``b`` is overwritten."""
    lesser = torch.minimum(a, b)
    return lesser, torch.maximum(a, b, out=b)

"""Scales that serve blocks of consecutive elements: largest magnitudes, and factors applied.

Work goes in pieces of whole blocks whose scratch stays in the cache, and codes are converted by a
copy before anything is computed with them: an operator that mixes dtypes makes a temporary.
Measured on one thread, n = 1e7 fp32, heap kept: codes times factors 6.8 -> 3.5 ms, the mean of four
ranks' codes 18 -> 9.5 ms.

Letters: N world size, n elements of the vector, B elements of a block; the last block may be short.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# 2 MB of fp32. Larger than other scratch, as each piece of codes or of a gradient is also read from
# memory, and the first lines of it come late: pieces of 512 KB take a fifth to a third longer.
_PIECE = 1 << 19
# Scratch is to be small beside the bucket, too; below this the calls cost more than the arithmetic.
_PARTS, _SHORT = 8, 1 << 15


def block_count(n: int, block: int) -> int:
    """Return how many blocks n elements make, the short last one included."""
    return -(-n // block)


def pieces(n: int, block: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive pieces to work on at a time: their elements and their blocks.

    A piece is either made of whole blocks or the short last block alone, so that its elements can
    be viewed with a row for each of its blocks.

    Args:
        n: Elements of the vector.
        block: Elements B of a block.
        most: Most elements of a piece, unless a single block has more.
    """
    full = n // block
    step = max(1, most // block)
    for first in range(0, full, step):
        last = min(first + step, full)
        yield slice(first * block, last * block), slice(first, last)
    if full * block < n:
        yield slice(full * block, n), slice(full, full + 1)


def scratch_for(n: int, block: int, like: Tensor) -> Tensor:
    """Return room for any of the pieces of at most its own length of n elements, or of fewer.

    Args:
        n: Elements of the vector.
        block: Elements B of a block.
        like: Has the dtype and the device.
    """
    return like.new_empty(min(n, max(_most(n, like.device), block)))


def _most(n: int, device: torch.device) -> int:
    """Return the most elements to work on at a time: few kernels serve accelerators best."""
    return min(_PIECE, max(n // _PARTS, _SHORT)) if device.type == "cpu" else n


def row_peaks(rows: Tensor) -> Tensor:
    """Return the largest magnitude of every row, as a column; NaN where a row holds one."""
    # Two reductions read memory twice, but a copy of magnitudes would have to be written.
    return torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())


def peaks(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Return the largest magnitude of every block; NaN where a block holds one.

    Args:
        x: 1-D contiguous.
        block: Elements B of a block.
        dtype: Of the result.
    """
    found = x.new_empty(block_count(x.numel(), block), dtype=dtype)
    for where, blocks in pieces(x.numel(), block, _most(x.numel(), x.device)):
        found[blocks, None] = row_peaks(x[where].view(blocks.stop - blocks.start, -1))
    return found


def scaled(codes: Tensor, factors: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield codes times the factors of their blocks piece by piece, each valid until the next.

    Args:
        codes: 1-D, of an integer dtype.
        factors: One a block; what is yielded has their dtype.
        block: Elements B of a block.
    """
    n = codes.numel()
    scratch = scratch_for(n, block, factors)
    for where, blocks in pieces(n, block, scratch.numel()):
        room = scratch[: where.stop - where.start].copy_(codes[where])
        room.view(blocks.stop - blocks.start, -1).mul_(factors[blocks, None])
        yield where, room


def sum_scaled(
    codes: Tensor, factors: Tensor, block: int, out: Tensor, scratch: Tensor | None = None
) -> Tensor:
    """Write the sum over ranks of codes times the factors of their blocks.

    Added up in the dtype of the factors. A product and its addition may be one fused operation of
    the processor, rounded once: every rank gets the same bits if all run the same build of torch on
    processors that have it.

    Args:
        codes: ``(N, n)`` or more columns, of an integer dtype.
        factors: ``(N, blocks)`` or more columns.
        block: Elements B of a block.
        out: n elements, any float dtype; returned.
        scratch: See ``scratch_for``, in the dtype of the factors.
    """
    n = out.numel()
    if scratch is None:
        scratch = scratch_for(n, block, factors)
    # Straight into the result where that adds up at the same precision.
    sums = None if out.dtype == factors.dtype else torch.empty_like(scratch)
    for where, blocks in pieces(n, block, scratch.numel()):
        total = out[where] if sums is None else sums[: where.stop - where.start]
        rows = total.view(blocks.stop - blocks.start, -1)
        room = scratch[: where.stop - where.start]
        own, columns = codes[:, where], factors[:, blocks, None]
        total.copy_(own[0])
        rows.mul_(columns[0])
        for more, column in zip(own[1:], columns[1:], strict=True):
            room.copy_(more)
            rows.addcmul_(room.view_as(rows), column)
        if sums is not None:
            out[where].copy_(total)
    return out


def times_blocks(x: Tensor, factors: Tensor, block: int, start: int, out: Tensor) -> Tensor:
    """Multiply elements by the factors of their blocks.

    Args:
        x: Elements from ``start`` on, 1-D contiguous, of any dtype.
        factors: One a block, of the whole vector.
        block: Elements B of a block.
        start: Where in the vector the elements lie.
        out: As long as ``x``, any float dtype, may be ``x``; returned.
    """
    done = 0
    # Three rounds at most: up to the next block, whole blocks, what is left.
    while done < x.numel():
        number, within = divmod(start + done, block)
        left = x.numel() - done
        whole = left // block if within == 0 else 0
        width = block if whole else min(left, block - within)
        rows = max(whole, 1)
        piece = slice(done, done + rows * width)
        column = factors[number : number + rows, None]
        torch.mul(x[piece].view(rows, width), column, out=out[piece].view(rows, width))
        done = piece.stop
    return out

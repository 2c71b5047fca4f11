"""Scales that serve blocks of consecutive elements: largest magnitudes, and factors applied.

Letters: n elements of the vector, B elements of a block; the last block may be short.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradpilot.worker_agent.compressors.sent import cut_length, cuts


def block_count(n: int, block: int) -> int:
    """Return how many blocks n elements make, the short last one included."""
    return -(-n // block)


def peaks(x: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Return the largest magnitude of every block; NaN where a block holds one.

    Args:
        x: 1-D contiguous.
        block: Elements B of a block.
        dtype: Of the result.
    """
    full = x.numel() // block
    found = []
    for rows in (x[: full * block].view(full, block), x[full * block :].view(1, -1)):
        if rows.numel():
            # Two reductions read memory twice, but a copy of magnitudes would have to be written.
            found.append(torch.maximum(rows.amax(1), rows.amin(1).neg_()).to(dtype))
    return found[0] if len(found) == 1 else torch.cat(found)


def scaled(codes: Tensor, factors: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield codes times the factors of their blocks, piece by piece; see ``times_blocks``."""
    scratch = factors.new_empty(cut_length(codes.numel(), codes.device))
    for cut in cuts(codes.numel(), codes.device):
        room = scratch[: cut.stop - cut.start]
        yield cut, times_blocks(codes[cut], factors, block, cut.start, room)


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

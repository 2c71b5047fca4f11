"""Noise for stochastic rounding, cheap: a table of uniforms that is used again block by block.

``floor(x + u)`` with u uniform in (0, 1) is x in expectation. Fresh numbers for every element would
cost several times the rest of a quantizer, so elements share them: element i of block b gets entry
``i + b * _SHIFT`` of a table that is drawn anew for every step, bucket and rank. Each element's
noise is uniform over steps and seeds, hence unbiased, and independent of other ranks', hence the
errors of ranks average out; only two elements of one rank about a block apart err alike.

Measured on one thread, n = 1e7 fp32: 3.1 ms, against 57 ms for fresh numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradpilot.worker_agent.compressors.base import At

# 256 KB of fp32, which stays in the cache.
_BLOCK = 1 << 16
# Blocks must not start at the same entry: rows of a weight matrix often divide a block. A prime.
_SHIFT = 97
# Entries are odd multiples of half of this, so an integer of magnitude up to 128 plus an entry is
# exact in fp32 and can never reach the next integer. The price is a bias of at most 2**-17.
_GRAIN = 2.0**-16


class Dither:
    """The noise of one bucket, to be added to all of it at once or part by part.

    Args:
        n: Elements of the bucket.
        at: Where this takes place; noise differs from rank to rank.
        what: Names the purpose, see ``At.random``.
        dtype: Of what it is added to, float32 or float64.
        device: Of what it is added to.
    """

    def __init__(
        self,
        n: int,
        at: At,
        what: str = "dither",
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        blocks = -(-n // _BLOCK)
        entries = min(n, _BLOCK) + max(blocks - 1, 0) * _SHIFT
        generator = at.generator(what, device, own=True)
        table = torch.empty(entries, dtype=dtype, device=device)
        self._table = table.random_(0, 1 << 16, generator=generator).add_(0.5).mul_(_GRAIN)

    def add_(self, x: Tensor, start: int = 0) -> Tensor:
        """Add noise in (0, 1) in place and return ``x``.

        Args:
            x: Elements from ``start`` on, 1-D contiguous.
            start: Where in the bucket they lie; parts get what the whole would.
        """
        done = 0
        # Three rounds at most: up to the next block, whole blocks, what is left.
        while done < x.numel():
            left = x.numel() - done
            block, within = divmod(start + done, _BLOCK)
            blocks = left // _BLOCK if within == 0 else 0
            width = _BLOCK if blocks else min(left, _BLOCK - within)
            rows = max(blocks, 1)
            noise = self._table.as_strided((rows, width), (_SHIFT, 1), block * _SHIFT + within)
            x[done : done + rows * width].view(rows, width).add_(noise)
            done += rows * width
        return x


def add_dither_(x: Tensor, at: At, what: str = "dither") -> Tensor:
    """Add noise in (0, 1) in place, so that ``floor`` rounds without bias; return ``x``.

    Args:
        x: 1-D contiguous, float32 or float64.
        at: Where this takes place; noise differs from rank to rank.
        what: Names the purpose, see ``At.random``.
    """
    return Dither(x.numel(), at, what, dtype=x.dtype, device=x.device).add_(x)

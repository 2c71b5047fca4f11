"""Random Hadamard rotation, of a whole vector or of blocks of contiguous elements.

The fast transform of 2^l elements is l passes that replace pairs by their sum and difference. Only
the lowest passes stay within a block that fits the cache, so rotating blocks takes one trip to
memory where rotating everything takes one a pass.

On the CPU up to ten lowest passes are two matrix products, ``H_a X H_b`` of a block written as an
a x b matrix, at twice the speed of passes whose pairs lie close together. Products may round in any
order, so ranks on unlike machines could disagree in the last bit; but of integers whose sums stay
below 2^24 they are exact, and integers are what ranks decode. Elsewhere, and where matrix products
are allowed to drop bits, all passes are sums and differences, which are the same everywhere.

Measured on one thread, n = 1e7 fp32: blocks of 1024 by products 22 ms, by passes 66 ms; everything,
2^24 elements with padding, 120 ms.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache

import torch
from torch import Tensor

from gradpilot.worker_agent.compressors.base import At

_PRODUCT_BLOCK = 1 << 10
# Below, the passes run on one thread and take 0.2 ms; threads of a product that wait for each other
# on busy cores have been seen to take longer.
_PRODUCT_MIN_ELEMENTS = 1 << 15
# 512 KB of fp32, so that a part and its scratch stay in the cache.
_PRODUCT_PART = 1 << 17
# Signs of a longer block are products of two tables, one for places and one for rows.
_SIGNS = 1 << 16


def hadamard_(x: Tensor, block: int) -> Tensor:
    """Multiply every block by the Hadamard matrix of +-1, in place; twice gives ``block * x``.

    Args:
        x: 1-D contiguous, float32 or float64; ``block`` divides its length.
        block: Elements of a block, a power of two.
    """
    stride = 1
    if _products_pay(x):
        stride = min(block, _PRODUCT_BLOCK)
        _multiply_blocks_(x, stride)
    while stride < block:
        upper, lower = x.view(-1, 2, stride).unbind(1)
        upper.add_(lower)
        torch.sub(upper, lower, alpha=2, out=lower)
        stride *= 2
    return x


class Rotation:
    """A random rotation of blocks, up to the factor ``sqrt(block)``: signs, then Hadamard.

    Every block gets the same signs, drawn anew for each step and bucket, the same on all ranks.

    Args:
        block: Elements of a block, a power of two.
        at: Where this takes place.
        dtype: Of what is rotated, float32 or float64.
        device: Of what is rotated.
    """

    def __init__(
        self,
        block: int,
        at: At,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block = block
        places = min(block, _SIGNS)
        rows = block // places
        # Drawn on the CPU, so that ranks on unlike devices rotate alike.
        bits = torch.randint(0, 2, (places + rows,), generator=at.generator("signs"))
        signs = (2 * bits - 1).to(device, dtype)
        self._places, self._rows = signs[:places], signs[places:].view(-1, 1)

    def turn_(self, x: Tensor) -> Tensor:
        """Rotate in place and return ``x``, which is ``sqrt(block)`` times as long then.

        Args:
            x: 1-D contiguous; ``block`` divides its length.
        """
        return hadamard_(self._sign_(x), self.block)

    def turn_back_(self, x: Tensor) -> Tensor:
        """Undo ``turn_`` in place, up to the factor ``block``."""
        return self._sign_(hadamard_(x, self.block))

    def _sign_(self, x: Tensor) -> Tensor:
        table = x.view(-1, len(self._rows), len(self._places)).mul_(self._places)
        if len(self._rows) > 1:
            table.mul_(self._rows)
        return x


@lru_cache(maxsize=16)
def _matrix(order: int, dtype: torch.dtype) -> Tensor:
    """Return the Hadamard matrix of a power of two in natural order."""
    matrix = torch.ones(1, 1, dtype=dtype)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def _multiply_blocks_(x: Tensor, block: int) -> None:
    """Do the passes of short blocks by matrix products, part by part."""
    width = 1 << block.bit_length() // 2
    height = block // width
    left, right = _matrix(height, x.dtype), _matrix(width, x.dtype)
    scratch = torch.empty_like(x[:_PRODUCT_PART])
    for start in range(0, x.numel(), _PRODUCT_PART):
        part = x[start : start + _PRODUCT_PART]
        half = scratch[: part.numel()]
        torch.mm(part.view(-1, width), right, out=half.view(-1, width))
        shape = (-1, height, width)
        torch.matmul(left, half.view(shape), out=part.view(shape))


def _products_pay(x: Tensor) -> bool:
    """Return whether matrix products are faster than passes here, and keep all bits."""
    if x.device.type != "cpu" or x.numel() < _PRODUCT_MIN_ELEMENTS:
        return False
    # Torch refuses to tell where old and new settings were mixed: then it is not known.
    with contextlib.suppress(RuntimeError):
        return torch.get_float32_matmul_precision() == "highest"
    return False

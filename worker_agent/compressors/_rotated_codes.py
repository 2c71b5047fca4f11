"""Levels of a rotated gradient: what THC sends, and what a sum of them stands for.

Letters: n elements of the bucket, L largest level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradpilot.worker_agent.collectives.saturating import pack_nibbles, unpack_nibbles
from gradpilot.worker_agent.compressors._blockwise import peaks
from gradpilot.worker_agent.compressors._dither import Dither
from gradpilot.worker_agent.compressors._hadamard import Rotation
from gradpilot.worker_agent.compressors.base import At

RANGE = 3.29719
"""Standard deviations to each side of zero that L levels span.

A normal variable lies beyond in one case of 1024.
"""

# Blocks below this norm are not sent but wait in the residual: their scale would overflow.
_LEAST_NORM = 1e-30
# 512 KB of fp32, which stays in the cache.
_PART = 1 << 17


@dataclass(frozen=True, slots=True)
class Blocks:
    """How n elements divide into blocks that are rotated for themselves.

    Attributes:
        n: Elements.
        block: Elements of a block, a power of two, at least 2.
        count: Number of blocks.
    """

    n: int
    block: int
    count: int
    size: int = field(init=False)
    """Elements with padding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.block * self.count)

    @staticmethod
    def of(n: int, stages: int) -> Blocks:
        """Return the blocks of 2^stages elements, or one block that holds all of them."""
        block = 1 << min(stages, max(1, (n - 1).bit_length()))
        return Blocks(n, block, -(-n // block))

    def norms(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm of every block, or what bounds it where its square overflows."""
        norms = torch.empty(self.count, dtype=dtype, device=grad.device)
        full = self.n // self.block
        rows, rest = grad[: full * self.block].view(full, self.block), grad[full * self.block :]
        if full:
            torch.linalg.vector_norm(rows, dim=1, dtype=dtype, out=norms[:full])
        if full < self.count:
            norms[full] = torch.linalg.vector_norm(rest, dtype=dtype)
        bounds = peaks(grad, self.block, dtype).mul_(math.sqrt(self.block))
        return torch.where(norms.isinf(), bounds, norms)


class Coder:
    """Turns a gradient into codes and codes into a gradient, part by part to stay in the cache.

    Args:
        blocks: How the gradient divides.
        norms: What a block's levels scale with, the same on all ranks.
        levels: Largest level L.
        packed: Whether two codes share a byte.
        at: Where this takes place.
    """

    def __init__(self, blocks: Blocks, norms: Tensor, levels: int, packed: bool, at: At) -> None:
        self._packed = packed
        self._levels = levels
        self._blocks = blocks
        # A standard deviation of a block is norm / sqrt(block), and the transform without its
        # factor 1 / sqrt(block) makes that the norm itself.
        self._to_codes = torch.where(norms > _LEAST_NORM, levels / (RANGE * norms), 0.0)
        self._to_values = norms * (RANGE / (levels * blocks.block))
        dtype, device = norms.dtype, norms.device
        self._rotation = Rotation(blocks.block, at, dtype=dtype, device=device)
        self._dither = Dither(blocks.size, at, dtype=dtype, device=device)
        # A device that runs kernels asynchronously is served best by few of them.
        part = _PART if device.type == "cpu" else blocks.size
        self._part = min(max(part, blocks.block), blocks.size)
        self._scratch = torch.empty(self._part, dtype=dtype, device=device)
        self._codes = torch.empty(self._part, dtype=torch.int8, device=device)

    def encode(self, grad: Tensor) -> Tensor:
        """Return the payload: the levels of the rotated gradient, stochastically rounded."""
        size = self._blocks.size
        payload = self._codes.new_empty(size // 2 if self._packed else size)
        for start in range(0, size, self._part):
            own = grad[start : start + self._part]
            z = self._scratch[: min(self._part, size - start)]
            z[: own.numel()].copy_(own)
            z[own.numel() :].zero_()
            self._scale_(z, self._to_codes, start)
            self._dither.add_(self._rotation.turn_(z), start)
            z.floor_().clamp_(-self._levels, self._levels)
            into = self._bytes(payload, start, z.numel())
            if self._packed:
                pack_nibbles(self._codes[: z.numel()].copy_(z), out=into)
            else:
                into.copy_(z)
        return payload

    def decode(self, payload: Tensor, ranks: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield a payload's gradient over ``ranks``, part by part; each is valid until the next."""
        n, size, factors = self._blocks.n, self._blocks.size, self._to_values / ranks
        for start in range(0, size, self._part):
            z = self._scratch[: min(self._part, size - start)]
            codes = self._bytes(payload, start, z.numel())
            if self._packed:
                codes = unpack_nibbles(codes, out=self._codes[: z.numel()])
            self._rotation.turn_back_(z.copy_(codes))
            part = slice(start, min(start + z.numel(), n))
            yield part, self._scale_(z, factors, start)[: part.stop - start]

    def _bytes(self, payload: Tensor, start: int, count: int) -> Tensor:
        """Return the bytes of ``count`` codes from ``start`` on."""
        return (
            payload[start // 2 : (start + count) // 2] if self._packed else payload[start:][:count]
        )

    def _scale_(self, z: Tensor, factors: Tensor, start: int) -> Tensor:
        """Multiply every block from element ``start`` on by its factor, in place."""
        block = self._blocks.block
        first = start // block
        rows = z.view(-1, block)
        rows.mul_(factors[first : first + len(rows), None])
        return z

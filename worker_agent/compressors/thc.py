"""THC (Li et al., NSDI 2024) with partial rotation and saturation (Han et al., arXiv 2407.01378).

Ranks agree on a scale first, so their codes are integers of one grid and can be added as they are:
what N ranks sent is decoded once. A random rotation makes the elements of a block nearly normal
whatever the gradient was, so a grid of few levels fits all of them.

Letters: N world size, n elements of the bucket, q bits of a level, b bits on the wire, L largest
level, T the grid's range in standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.collectives.reduction import MAX, SUM, Reduction
from gradpilot.worker_agent.collectives.saturating import (
    INT8_LIMIT,
    NIBBLE_LIMIT,
    SATURATING_INT8,
    SATURATING_NIBBLES,
)
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors._rotated_codes import RANGE, Blocks, Coder
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Estimate, Rounds
from gradpilot.worker_agent.compressors.sent import Pieces
from gradpilot.worker_agent.compressors.settings import whole

# Standard deviations of a sum that the wire must hold. What lies beyond c of them is, of a normal
# variable, 2 ((1 + c^2) Q(c) - c phi(c)) of the mean square: 2 % for this c.
_DEVIATIONS = 1.8
# Correlation of the gradients of two ranks for which the bound on N is made.
_CORRELATION = 0.5


@COMPRESSORS.register("thc")
@dataclass(frozen=True, kw_only=True)
class Thc(Compressor):
    """Sends q-bit levels of the rotated gradient, added over ranks as integers of b bits.

    Levels are ``-L .. L`` with ``L = 2^(q-1) - 1``, evenly spaced over T standard deviations to
    each side, and rounding is stochastic: a rank errs by ``T^2 / 6 L^2`` of its squared norm (.037
    at q = 4, .20 at q = 3), the mean of N independent ranks by an N-th of it. Clamping beyond T
    takes away a thousandth, so it is not quite unbiased.

    Sums that may leave the wire's range saturate at every hop; 4 bits always may, 8 bits once
    ``N L > 127``. The loss is in nobody's residual: it is gone. So N is bounded (``most_ranks``),
    such that of gradients correlated by 1/2 saturation takes 2 % of the mean's squared norm at
    most; of gradients that are alike on all ranks it takes more. Skipping steps is not possible:
    sums of integers cannot be rescaled.

    The norm is that of a block, not of the bucket, since rotating a block cannot even out
    differences between blocks. The published hook sends its first step dense; here warming up is up
    to the plan.

    Attributes:
        bits: Bits q of a level, at most those of the wire. Fewer than 3 would send more noise than
            gradient.
        stages: Passes l of the rotation: blocks have 2^l contiguous elements. From log2 n on,
            everything is rotated as a whole, which costs several times as much.
        wire_bits: Bits b of a code on the wire, 4 or 8.
    """

    name: ClassVar[str] = "thc"
    source: ClassVar[str] = (
        "Li et al., THC, NSDI 2024; partial rotation and saturation after Han et al.,"
        " arXiv 2407.01378, from a summary; bound on the ranks derived"
    )
    estimator = "biased"

    bits: int = whole(4, 3, 8)
    stages: int = whole(10, 6, 31)
    wire_bits: int = whole(8, 4, 8)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire_bits not in (4, 8):
            raise ConfigError(f"thc: setting wire_bits must be 4 or 8, got {self.wire_bits}")
        if self.bits > self.wire_bits:
            raise ConfigError(
                f"thc: setting bits must be at most wire_bits, {self.wire_bits}, got {self.bits}"
            )

    @classmethod
    def ladder(cls) -> Sequence[Thc]:
        """Return 3, 4 and 5 bits on a wire of 8, which the backend can add up."""
        return tuple(cls(bits=bits) for bits in (3, 4, 5))

    @property
    def collectives(self) -> tuple[str, ...]:
        """Return who can carry it: not the backend where sums always saturate."""
        able = super().collectives
        return able if self.wire_bits == 8 else tuple(c for c in able if c != "native")

    @property
    def levels(self) -> int:
        """Return L, the largest level."""
        return (1 << (self.bits - 1)) - 1

    @property
    def limit(self) -> int:
        """Return the largest sum that the wire holds."""
        return INT8_LIMIT if self.wire_bits == 8 else NIBBLE_LIMIT

    @property
    def most_ranks(self) -> int:
        """Return the largest N for which saturation stays rare.

        A level has variance ``L^2 / T^2``, and rounding adds 1/6 that is independent; ranks
        correlate by c. So a sum has variance ``N (1 + (N - 1) c) L^2 / T^2 + N / 6``. Sums that
        cannot overflow are allowed in any case.
        """
        variance = (self.levels / RANGE) ** 2
        squared = _CORRELATION * variance
        linear = (1.0 - _CORRELATION) * variance + 1.0 / 6.0
        most = (self.limit / _DEVIATIONS) ** 2
        root = (math.sqrt(linear**2 + 4.0 * squared * most) - linear) / (2.0 * squared)
        return max(int(root), self.limit // self.levels)

    def reduction(self, world_size: int) -> Reduction:
        """Return how payloads of so many ranks add up."""
        if self.wire_bits == 4:
            return SATURATING_NIBBLES
        return SUM if world_size * self.levels <= self.limit else SATURATING_INT8

    def check(self, world_size: int, collective: str) -> None:
        """Refuse more ranks than saturation allows."""
        if world_size > self.most_ranks:
            raise ConfigError(
                f"thc with bits={self.bits} on wire_bits={self.wire_bits} serves at most"
                f" {self.most_ranks} ranks, got {world_size}: sums would saturate too often"
            )

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one norm a block, then b bits an element, padded to whole blocks; no skipping."""
        blocks = Blocks.of(n, self.stages)
        return (
            WireRound("all_reduce", 4 * blocks.count, skippable=False),
            WireRound("all_reduce", blocks.size * self.wire_bits // 8, skippable=False),
        )

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Agree on norms, add up levels of the rotated gradient, rotate the sum back."""
        precise = precise_dtype(grad)
        blocks = Blocks.of(grad.numel(), self.stages)
        norms = blocks.norms(grad, precise)

        # Largest norm of a block over ranks. Integers cannot carry a NaN, so the norms do.
        norms.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        norms = yield AllReduce(norms, skippable=False, reduction=MAX)

        coder = Coder(blocks, norms, self.levels, self.wire_bits == 4, at)
        payload = coder.encode(grad)
        own = payload.clone() if at.feedback else None
        total = yield AllReduce(payload, skippable=False, reduction=self.reduction(at.world_size))

        mean = at.room(grad)
        for part, values in coder.decode(total, at.world_size):
            mean[part] = values
        return Estimate(mean, None if own is None else Pieces(partial(coder.decode, own, 1)))

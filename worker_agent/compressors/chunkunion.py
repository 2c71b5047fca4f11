"""Union of chunks (after OmniReduce and DynamiQ): every rank's largest chunks, by all-reduce.

Ranks mark the chunks that are largest on them, an all-reduce of the marks tells all ranks the same
union, and a second one averages the values in it. What a rank holds there is sent whether it marked
the chunk or not.

Letters: N world size, n elements of the bucket, C elements of a chunk, J chunks aimed at, k chunks
that one rank marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.collectives.reduction import MAX
from gradpilot.worker_agent.compressors._agreed import element_bytes, values_rounds, wire_format
from gradpilot.worker_agent.compressors._chunks import (
    Chosen,
    chosen_rounds,
    chunk_count,
    chunk_energies,
    leading,
)
from gradpilot.worker_agent.compressors._select import kept
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Rounds
from gradpilot.worker_agent.compressors.settings import kept_fraction, whole

# How fast k follows the union, and how far off a union may count as, up or down.
_PACE = 0.25
_FARTHEST = 0.6


def marks_at_first(target: int, count: int, world_size: int) -> float:
    """Return the k for which N ranks that mark at random aim at ``target`` chunks of ``count``.

    Ranks agree better than at random, so the first union is rather too small than too large.
    """
    return float(count * (1.0 - (1.0 - target / count) ** (1.0 / world_size)))


def marks_after(marks: float, united: int, target: int) -> float:
    """Return the next k after a union of ``united`` chunks: ``3k/4 + k/4 target/united``, clamped.

    A union is as large as k or larger, so k never needs to exceed ``target``.
    """
    excess = min(max(united / target, _FARTHEST), 1.0 / _FARTHEST)
    following = (1.0 - _PACE) * marks + _PACE * marks / excess
    return min(max(following, 1.0), float(target))


@COMPRESSORS.register("chunkunion")
@dataclass(frozen=True, kw_only=True)
class ChunkUnion(Compressor):
    """Keeps every chunk that is among the k largest on some rank.

    How far the ranks' choices overlap is not known beforehand, so k adapts until the union has
    about J chunks. All ranks see the same unions and so have the same k. Unlike the sum of energies
    of ``topkc``, a mark says nothing of how large a chunk is, but costs one byte, and none of a
    rank's largest chunks is outvoted.

    Attributes:
        ratio: Fraction J C / n, (0, 1], that the union aims at; J is rounded down, at least 1. With
            many ranks and few chunks even unions of one mark for each rank may be larger.
        chunk: Elements C of a chunk.
        wire_dtype: How values travel: ``bf16``, ``fp16`` or ``fp32``. What 16 bits round away waits
            in the residual.
    """

    name: ClassVar[str] = "chunkunion"
    source: ClassVar[str] = (
        "Fei et al., OmniReduce, SIGCOMM 2021, in the form of DynamiQ's baseline"
    )
    fixed_wire = False
    gain_model: ClassVar[str] = "energy"
    gain_factor = 0.4

    ratio: float = kept_fraction(0.1)
    chunk: int = whole(256, 1, 1 << 20)
    wire_dtype: str = wire_format("bf16")

    @classmethod
    def ladder(cls) -> Sequence[ChunkUnion]:
        """Return ratios about a factor of 3 apart."""
        return tuple(cls(ratio=ratio) for ratio in (0.003, 0.01, 0.03, 0.1, 0.3))

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one byte for each chunk, then J C values; n values alone if J is all chunks.

        The union may be smaller or larger than J; of all chunks it sends n values.
        """
        count = chunk_count(n, self.chunk)
        target = kept(count, self.ratio)
        values = self._values(n, target)
        if target == count:
            return (values,)
        return (WireRound("all_reduce", count, skippable=False), values)

    def _values(self, n: int, united: int) -> WireRound:
        """Return the round that carries the values of a union."""
        elements = min(united * self.chunk, n)
        return WireRound("all_reduce", element_bytes(self.wire_dtype) * elements)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Mark chunks, unite the marks, average the values of the union."""
        n = grad.numel()
        count = chunk_count(n, self.chunk)
        target = kept(count, self.ratio)
        if target == count:
            return (yield from values_rounds(grad, at, self.wire_dtype))

        marks = marks_at_first(target, count, at.world_size)
        if at.memory:
            # Remembered as a share of J: the ratio may have changed since.
            marks = float(at.memory["share"]) * target
        k = min(max(round(marks), 1), target)
        bitmap = torch.zeros(count, dtype=torch.uint8, device=grad.device)
        bitmap[leading(chunk_energies(grad, self.chunk), k)] = 1
        # Not a sum, which overflows a byte from 256 ranks on.
        united = (yield AllReduce(bitmap, skippable=False, reduction=MAX)).nonzero().view(-1)

        if len(united) == count:
            estimate = yield from values_rounds(grad, at, self.wire_dtype)
        else:
            chosen = Chosen(n, self.chunk, united)
            estimate = yield from chosen_rounds(grad, chosen, at, self.wire_dtype)
        share = marks_after(marks, len(united), target) / target
        # On the host, where it is read.
        return replace(estimate, memory={"share": torch.tensor(share, dtype=torch.float64)})

"""TopKC (Han et al., "Beyond Throughput and Compression Ratios"): the chunks that matter to all.

Ranks add up the energies of their chunks, so all know the same scores and take the same chunks: no
index is sent, and the values are all-reduced.

Letters: N world size, n elements of the bucket, C elements of a chunk, J chosen chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllReduce
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


@COMPRESSORS.register("topkc")
@dataclass(frozen=True, kw_only=True)
class TopKC(Compressor):
    """Keeps the J chunks of C elements whose squared norms, added over ranks, are largest.

    A fp32 gradient costs ``16/C + 16 J C / n`` bits per element on a 16-bit wire, twice that on
    fp32. Where large elements lie together it beats top-k at equal bits by far; where they do not
    (i.i.d., or permuted) it loses.

    On a 16-bit wire the scores travel in bf16 whatever the values do: squares leave the range of
    fp16 at gradients of 3e-5. With hundreds of ranks a sum of bf16 scores loses the small ones;
    prefer fp32 there.

    Every rank selects from the reply for itself, so the all-reduce must end with the same bits
    everywhere, as rings and trees do that pass on the finished sum.

    Very small ratios are dangerous: three chunks of a network of 0.8 M parameters let residuals
    grow until they arrived as bursts, and training diverged.

    Attributes:
        ratio: Kept fraction J C / n, (0, 1]; J is rounded down, at least 1.
        chunk: Elements C of a chunk.
        wire_dtype: How values travel: ``bf16``, ``fp16`` (as published) or ``fp32``. What 16 bits
            round away waits in the residual. bf16 is the default since it has the range of fp32,
            which a scaled loss may need.
    """

    name: ClassVar[str] = "topkc"
    source: ClassVar[str] = "Han et al., arXiv 2407.01378; details from a summary and from memory"
    gain_model: ClassVar[str] = "energy"
    gain_factor = 0.4

    ratio: float = kept_fraction(0.1)
    chunk: int = whole(128, 1, 1 << 20)
    wire_dtype: str = wire_format("bf16")

    @classmethod
    def ladder(cls) -> Sequence[TopKC]:
        """Return ratios about a factor of 3 apart."""
        return tuple(cls(ratio=ratio) for ratio in (0.003, 0.01, 0.03, 0.1, 0.3))

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return a score for each chunk, J C values; n values alone if that is all of them."""
        count = chunk_count(n, self.chunk)
        j, size = kept(count, self.ratio), element_bytes(self.wire_dtype)
        if j == count:
            return (WireRound("all_reduce", size * n),)
        scores = WireRound("all_reduce", size * count, skippable=False)
        return (scores, WireRound("all_reduce", size * j * self.chunk))

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Add up scores, select the chunks, average their values."""
        n = grad.numel()
        count = chunk_count(n, self.chunk)
        j = kept(count, self.ratio)
        if j == count:
            return (yield from values_rounds(grad, at, self.wire_dtype))

        scores = chunk_energies(grad, self.chunk)
        if element_bytes(self.wire_dtype) == 2:
            scores = scores.bfloat16()
        total = yield AllReduce(scores, skippable=False)

        chosen = Chosen(n, self.chunk, leading(total, j))
        return (yield from chosen_rounds(grad, chosen, at, self.wire_dtype))

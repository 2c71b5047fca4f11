"""LWTopk: top-k of every parameter by itself.

Letters: N world size, n_l elements of parameter l, k_l kept of them, k of all parameters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors._select import kept, largest
from gradpilot.worker_agent.compressors._sparse_message import average_selected
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Rounds
from gradpilot.worker_agent.compressors.settings import SPARSE_RATIOS, kept_fraction


@COMPRESSORS.register("lwtopk")
@dataclass(frozen=True, kw_only=True)
class LwTopK(Compressor):
    """Keeps the k_l elements of largest magnitude of every parameter, at least one of each.

    No parameter has to wait for others whose gradients are larger, at the price of a lower gain
    than top-k over the whole bucket. k_l depends on shapes alone, so where the published method
    gathers parameter by parameter, one all-gather carries all of them.

    Attributes:
        ratio: Kept fraction k_l / n_l, (0, 1].
    """

    name: ClassVar[str] = "lwtopk"
    source: ClassVar[str] = "Layer-wise top-k, as in Tyagi and Swany, Flexible Communication, 2023"
    exchange = "all_gather"
    gain_model: ClassVar[str] = "energy"

    ratio: float = kept_fraction(0.01)

    @classmethod
    def ladder(cls) -> Sequence[LwTopK]:
        """Return ratios about a factor of 3 apart."""
        return tuple(cls(ratio=ratio) for ratio in SPARSE_RATIOS)

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one all-gather of k fp32 values and k int32 indices: 8k bytes."""
        kept(n, self.ratio)  # refuses what indices cannot address
        k = sum(kept(length, self.ratio) for length in _lengths(n, shapes))
        return (WireRound("all_gather", 8 * k),)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Select within every parameter, gather all of it at once."""
        chosen, start = [], 0
        for length in _lengths(grad.numel(), at.shapes):
            part = grad[start : start + length]
            chosen.append(largest(part, kept(length, self.ratio)).add_(start))
            start += length
        return (yield from average_selected(grad, torch.cat(chosen), at))


def _lengths(n: int, shapes: Sequence[torch.Size]) -> list[int]:
    """Return the elements of every parameter; without shapes the bucket counts as one."""
    return [length for shape in shapes if (length := shape.numel())] or [n]

"""Top-k: every rank sends its own k largest elements by one all-gather.

Letters: N world size, n elements of the bucket, k kept elements.
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


@COMPRESSORS.register("topk")
@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Keeps the k elements of largest magnitude, exactly.

    The efficiency exponent was fitted to two small models, on images and on text, at the learning
    rate that suits dense training (``bench/results/efficiency.json``): 0.39 +- 0.13. At a rate
    matched to the ratio it would be 0.33.

    Attributes:
        ratio: Kept fraction k/n, (0, 1].
    """

    name: ClassVar[str] = "topk"
    source: ClassVar[str] = "Lin et al. 2018 and Stich et al. 2018: exact top-k with error feedback"
    exchange = "all_gather"
    calibrated: ClassVar[bool] = True
    gain_model: ClassVar[str] = "energy"
    efficiency_exponent = 0.39

    ratio: float = kept_fraction(0.01)

    @classmethod
    def ladder(cls) -> Sequence[TopK]:
        """Return ratios about a factor of 3 apart."""
        return tuple(cls(ratio=ratio) for ratio in SPARSE_RATIOS)

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one all-gather of k fp32 values and k int32 indices: 8k bytes."""
        return (WireRound("all_gather", 8 * kept(n, self.ratio)),)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Gather all ranks' values and indices; the mean is their sum over N."""
        k = kept(grad.numel(), self.ratio)
        return (yield from average_selected(grad, largest(grad, k), at))

"""1-bit SGD (Seide et al., Interspeech 2014): the sign of each element and one mean a sign.

Letters: N world size, n elements of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors._bits import (
    Layout,
    gathered_codes,
    put_codes_,
)
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import (
    COMPRESSORS,
    At,
    Compressor,
    Rounds,
)


@COMPRESSORS.register("onebit")
@dataclass(frozen=True, kw_only=True)
class OneBit(Compressor):
    """Sends the mean of the negative elements, that of the others, and which is which.

    A projection on two groups: the sum of what is sent equals the sum of the gradient, and what
    stays behind is the variance within the groups, at most the whole norm. The gain is 2/pi for
    normal elements. The published algorithm has two means for every column of a weight matrix; here
    a bucket has two.
    """

    name: ClassVar[str] = "onebit"
    source: ClassVar[str] = "Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014"
    exchange = "all_gather"
    gain_factor = 0.64

    @classmethod
    def ladder(cls) -> Sequence[OneBit]:
        """Return the only member."""
        return (cls(),)

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one all-gather of two fp32 means and n bits, padded to 4 bytes."""
        return (WireRound("all_gather", Layout(n, width=1, scalars=2).bytes),)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Gather all ranks' means and signs; the mean is that of what they stand for."""
        layout = Layout(grad.numel(), width=1, scalars=2, dtype=precise_dtype(grad))
        message = layout.new(grad.device)
        means = layout.scalars_of(message)
        packed = layout.codes_of(message)
        scratch = layout.scratch(grad.device)
        negatives = torch.zeros((), dtype=torch.int64, device=grad.device)
        for part in layout.parts:
            own, room = grad[part.elements], scratch[: part.length]
            negative = own < 0
            put_codes_(packed, part, negative)
            negatives += negative.count_nonzero()
            # Each sign by itself: a difference of two sums would cancel where a group is small.
            means[0] += room.copy_(own).clamp_(max=0.0).sum()
            means[1] += room.copy_(own).clamp_(min=0.0).sum()
        means[0] /= negatives.clamp(min=1)
        means[1] /= (layout.n - negatives).clamp(min=1)

        return (yield from gathered_codes(layout, message, _decode, grad, at))


def _decode(codes: Tensor, scalars: Tensor, out: Tensor, start: int) -> None:
    negative, other = scalars
    out.copy_(codes).mul_(negative - other).add_(other)

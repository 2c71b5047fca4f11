"""EF-signSGD (Karimireddy et al., ICML 2019): signs with one scale, and error feedback.

Letters: N world size, n elements of the bucket, p corrected gradient.
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


@COMPRESSORS.register("efsignsgd")
@dataclass(frozen=True, kw_only=True)
class EfSignSgd(Compressor):
    """Sends ``(||p||_1 / n) sign(p)``: one bit an element and one scale.

    What stays behind is ``1 - ||p||_1^2 / (n ||p||_2^2)`` of the squared norm, so the gain is 2/pi
    for normal elements and falls with heavier tails, to 1/n for a single one. Zero has a sign too,
    which error feedback takes back: a bucket of mostly zeros is served badly.

    The learning rate of the published algorithm, inside its p, is left to the optimizer: a constant
    factor commutes with sign and scale.
    """

    name: ClassVar[str] = "efsignsgd"
    source: ClassVar[str] = "Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019"
    exchange = "all_gather"
    gain_factor = 0.64

    @classmethod
    def ladder(cls) -> Sequence[EfSignSgd]:
        """Return the only member."""
        return (cls(),)

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one all-gather of an fp32 scale and n bits, padded to 4 bytes."""
        return (WireRound("all_gather", Layout(n, width=1, scalars=1).bytes),)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Gather all ranks' scales and signs; the mean is that of the scaled signs."""
        layout = Layout(grad.numel(), width=1, scalars=1, dtype=precise_dtype(grad))
        message = layout.new(grad.device)
        scale = layout.scalars_of(message)[0]
        packed = layout.codes_of(message)
        scratch = layout.scratch(grad.device)
        for part in layout.parts:
            own = grad[part.elements]
            put_codes_(packed, part, own < 0)
            scale.add_(scratch[: part.length].copy_(own).abs_().sum())
        scale.div_(layout.n)

        return (yield from gathered_codes(layout, message, _decode, grad, at))


def _decode(codes: Tensor, scalars: Tensor, out: Tensor, start: int) -> None:
    # Doubling is exact, so this is -scale or scale to the bit.
    scale = scalars[0]
    out.copy_(codes).mul_(-2 * scale).add_(scale)

"""bf16 on the wire: half the bytes, 8 significant bits, the range of fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors._sixteen_bit import sixteen_bit_rounds
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Rounds


@COMPRESSORS.register("bf16")
@dataclass(frozen=True, kw_only=True)
class Bf16(Compressor):
    """Sends every element in bf16; the safe choice."""

    name: ClassVar[str] = "bf16"
    source: ClassVar[str] = "PyTorch bf16_compress_hook, here with error feedback"
    reduce_scatter: ClassVar[bool] = True
    single_round: ClassVar[bool] = True
    calibrated: ClassVar[bool] = True

    @classmethod
    def ladder(cls) -> Sequence[Bf16]:
        """Return the one member."""
        return (cls(),)

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one all-reduce of 2n bytes."""
        return (WireRound("all_reduce", 2 * n),)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Average by one all-reduce in bf16; see ``sixteen_bit_rounds``."""
        return sixteen_bit_rounds(grad, at, torch.bfloat16)

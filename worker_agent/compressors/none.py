"""No compression: one all-reduce in the dtype of the gradient. Baseline, default and test double.

Letters: N world size, n elements of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Estimate, Rounds
from gradpilot.worker_agent.division import divide_


def dense_rounds(grad: Tensor, at: At) -> Rounds:
    """Average a gradient in its own dtype by one all-reduce.

    Multiplies by 1/N (or divides, see ``At.divide``) and then sums, as DDP does without a hook, so
    that the bits agree with it.
    """
    part = at.room(grad).copy_(grad) if at.feedback else grad
    request = AllReduce(divide_(part, at.world_size, at.divide))
    mean = yield request
    sent = None
    if at.feedback and request.omitted:
        sent = grad.clone()
        for omitted in request.omitted:
            sent[omitted].zero_()
    return Estimate(mean, sent)


@COMPRESSORS.register("none")
@dataclass(frozen=True, kw_only=True)
class NoCompression(Compressor):
    """Sends every element as it is."""

    name: ClassVar[str] = "none"
    source: ClassVar[str] = "PyTorch DistributedDataParallel without a hook"
    estimator = "exact"
    reduce_scatter: ClassVar[bool] = True
    lossless: ClassVar[bool] = True
    single_round: ClassVar[bool] = True
    calibrated: ClassVar[bool] = True

    @classmethod
    def ladder(cls) -> Sequence[NoCompression]:
        """Return the one member."""
        return (cls(),)

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one all-reduce of 4n bytes."""
        return (WireRound("all_reduce", 4 * n),)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Average by one all-reduce; in place if ``at.feedback`` is False."""
        return dense_rounds(grad, at)

"""AR-Topk (Tyagi and Swany, "Flexible Communication", IEEE BigData 2023): top-k by all-reduce.

One rank's top-k indices are broadcast; every rank all-reduces its own values at those indices. What
a rank holds elsewhere, its own largest elements included, waits in its residual.

Letters: N world size, n elements of the bucket, k kept elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllGather, AllReduce, Broadcast
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors._select import kept, largest
from gradpilot.worker_agent.compressors._turns import next_source, recalled, remembered
from gradpilot.worker_agent.compressors.base import (
    COMPRESSORS,
    NOTHING,
    At,
    Compressor,
    Estimate,
    Rounds,
)
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.compressors.settings import SPARSE_RATIOS, choice, kept_fraction


@COMPRESSORS.register("artopk")
@dataclass(frozen=True, kw_only=True)
class ArTopK(Compressor):
    """Keeps the k elements that are largest on one rank, the source.

    ``star`` takes the ranks in turn, so every rank is the source once in N steps and only the
    source selects. ``var`` takes the rank whose top-k values have the largest squared norm, which
    all ranks must select and compare for. ``hybrid`` takes the ranks in turn until the energies of
    their gradients, compared in every step and remembered, have been so uneven for a while that
    following the loudest pays, and back; only the source selects. It remembers how many steps ago
    each rank was the source (``ages``), and no rank waits for 5 N steps.

    The gain is about 3/4 of top-k's at the same ratio. The efficiency exponents were fitted to two
    small models, on images and on text, at the learning rate that suits dense training
    (``bench/results/efficiency.json``): 0.52 +- 0.20 for ``star``, 0.37 +- 0.19 for ``var``.
    ``hybrid`` was not measured and gets that of ``star``.

    Attributes:
        ratio: Kept fraction k/n, (0, 1].
        selection: How the source is chosen, ``star``, ``var`` or ``hybrid``.
    """

    name: ClassVar[str] = "artopk"
    source: ClassVar[str] = "Tyagi and Swany, Flexible Communication, IEEE BigData 2023"
    calibrated: ClassVar[bool] = True
    gain_model: ClassVar[str] = "energy"
    gain_factor = 0.75

    ratio: float = kept_fraction(0.01)
    selection: str = choice("star", "var", "hybrid")

    @property
    def efficiency_exponent(self) -> float:
        """Return the fitted exponent of the selection."""
        return 0.37 if self.selection == "var" else 0.52

    @classmethod
    def ladder(cls) -> Sequence[ArTopK]:
        """Return ratios about a factor of 3 apart for the two published selections."""
        return tuple(
            cls(ratio=ratio, selection=selection)
            for selection in ("star", "var")
            for ratio in SPARSE_RATIOS
        )

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return 4 bytes of norm (but for ``star``), k int32 indices, k fp32 values."""
        k = kept(n, self.ratio)
        indices_and_values = (WireRound("broadcast", 4 * k), WireRound("all_reduce", 4 * k))
        if self.selection == "star":
            return indices_and_values
        return (WireRound("all_gather", 4), *indices_and_values)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Agree on a source, take its indices, average all ranks' values there."""
        k = kept(grad.numel(), self.ratio)

        # The source and its indices.
        memory: Mapping[str, Tensor] = NOTHING
        own = None
        if self.selection == "var":
            own = largest(grad, k)
            energy = grad.index_select(0, own).float().square().sum().view(1)
            energies = yield AllGather(energy)
            source = int(energies.view(-1).argmax())  # the first of equal ones
        elif self.selection == "hybrid":
            norms = (yield AllGather(_finite_norm(grad))).view(-1).tolist()
            source, standing = next_source(recalled(at.memory, at.world_size), norms, at.step)
            memory = remembered(standing)
        else:
            source = at.step % at.world_size
        if own is None and at.rank == source:
            own = largest(grad, k)
        if own is None:
            message = torch.empty(k, dtype=torch.int32, device=grad.device)
        else:
            message = own.to(torch.int32)
        indices = (yield Broadcast(message, source)).long()

        # Own values there, averaged.
        values = grad.index_select(0, indices)
        request = AllReduce(values / at.world_size)
        averaged = yield request

        mean = at.room(grad).zero_().index_copy_(0, indices, averaged)
        if not at.feedback:
            return Estimate(mean, None, memory=memory)
        for part in request.omitted:
            values[part].zero_()
        return Estimate(mean, Sparse(indices, values), memory=memory)


def _finite_norm(grad: Tensor) -> Tensor:
    """Return the norm as one fp32 number, NaN for NaN; no more than fp32 holds."""
    precise = precise_dtype(grad)
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=precise)
    return norm.clamp(max=torch.finfo(torch.float32).max).float().view(1)

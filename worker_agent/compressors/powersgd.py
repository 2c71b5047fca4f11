"""PowerSGD (Vogels et al., NeurIPS 2019): low-rank factors by power iteration.

The matrices of all ranks are projected onto one shared subspace of rank r, and what is linear in
the gradient, the coordinates within it, is averaged. The subspace follows the gradient from step to
step (warm start), as power iteration follows the leading singular vectors.

Letters: N world size, n elements of the bucket, M matrix of one rank, s and l its shorter and
longer side, r rank of the factors, B orthonormal basis of the subspace.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllReduce, Collective
from gradpilot.worker_agent.compressors._low_rank import LONG, SHORT, Layout, layout_of, other
from gradpilot.worker_agent.compressors._orthogonal import orthonormal, unit_scale
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Estimate, Rounds
from gradpilot.worker_agent.compressors.none import dense_rounds
from gradpilot.worker_agent.compressors.sent import Pieces, Sent
from gradpilot.worker_agent.compressors.settings import choice, real, whole


@COMPRESSORS.register("powersgd")
@dataclass(frozen=True, kw_only=True)
class PowerSgd(Compressor):
    """Sends matrices as factors of rank r; vectors and small matrices as they are.

    A step makes a basis B of one side and sends each rank's coordinates M B in it, so a rank's part
    is ``M B B^T`` (or ``B B^T M``), a projection of its own gradient, and the mean of the parts is
    what all end with. Where the basis comes from is the difference between the two forms:

    * ``full``: from all ranks' gradients of this step. The factor of the longer side that was kept
      from the last step is multiplied with M, the product averaged (first round) and
      orthogonalised; coordinates along the longer side follow (second round).
    * ``half``: from the coordinates that the last step averaged, orthogonalised. Sides alternate,
      and a step is one round of half the bytes; the parity is that of the factor kept.

    The basis of ``full`` lies on the shorter side, where orthogonalising costs least: the published
    order of the two products for a wide matrix, and that of its transpose for a tall one. Every
    rank orthogonalises for itself, so ranks need alike processors and as many threads to end with
    the same bits.

    Attributes:
        rank: Rank r; at most the shorter side is used.
        step: How much of the power iteration a step does, ``full`` or ``half``.
        orthogonalisation: ``qr`` or ``gram_schmidt``, in fp32 or better.
        min_saving: Elements for each element sent below which a matrix is not compressed.
    """

    name: ClassVar[str] = "powersgd"
    source: ClassVar[str] = "Vogels et al., PowerSGD, NeurIPS 2019; half steps: epfml/powersgd"
    needs_matrices: ClassVar[bool] = True
    calibrated: ClassVar[bool] = True
    # bench/results/efficiency.json, ``full`` with ranks 4 and 16 on two tasks: 0.093, and twice its
    # standard error. What it sends are directions of the mean gradient, so it goes on well at gains
    # at which a selection of elements does not: a gain of 0.08 was worth 0.75 of a step.
    efficiency_exponent = 0.135
    floor_factor: ClassVar[float] = 0.27

    rank: int = whole(4, 1, 64)
    step: str = choice("full", "half")
    orthogonalisation: str = choice("qr", "gram_schmidt")
    min_saving: float = real(2.0, 0.0, 1e9)

    @property
    def gain_factor(self) -> float:
        """Return the mean of the gains that the two tasks of ``bench.efficiency`` had.

        Geometric, of 0.30 and 0.08 with rank 4 and of 0.84 and 0.31 with rank 16.
        """
        return 0.5 if self.rank >= 16 else 0.16

    def calibrated_for(self, world_size: int) -> bool:
        """Return whether it is one of the forms above.

        The others took far more steps than their gain tells: with rank 1, or a half step of rank 4,
        a step was worth 0.07 to 0.46 of a dense one at an unchanged learning rate.
        """
        return self.step == "full" and self.rank >= 4

    @property
    def fixed_wire(self) -> bool:
        """Return whether it is; ``half`` alternates between the two factors."""
        return self.step == "full"

    @classmethod
    def ladder(cls) -> Sequence[PowerSgd]:
        """Return ranks a factor of 4 apart for both forms."""
        return tuple(cls(rank=rank, step=step) for step in ("full", "half") for rank in (1, 4, 16))

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return 4rs bytes, then 4rl and 4 for each uncompressed element; half: r(s + l)/2 once.

        ``half`` sends 4rs bytes in its first step, then 4rl, and so on: this is their mean.
        """
        layout = self._layout(n, shapes)
        if not layout.groups:
            return (WireRound("all_reduce", 4 * n),)
        short, long = layout.elements(SHORT), layout.elements(LONG)
        rest = 4 * layout.vector_elements
        if self.step == "half":
            return (WireRound("all_reduce", 2 * (short + long) + rest),)
        return (
            WireRound("all_reduce", 4 * short, skippable=False),
            WireRound("all_reduce", 4 * long + rest),
        )

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Agree on a basis, average the coordinates of all ranks in it."""
        layout = self._layout(grad.numel(), at.shapes)
        if not layout.groups:
            return (yield from dense_rounds(grad, at))
        precise = grad.to(precise_dtype(grad))

        side, basis = self._start(layout, precise, at)
        if self.step == "full":
            basis = yield from self._steer(layout, precise, basis, at)
            side = SHORT
        else:
            basis = [orthonormal(factor, self.orthogonalisation) for factor in basis]

        across = other(side)
        own = precise.new_empty(layout.elements(across) + layout.vector_elements)
        for (group, out), factor in zip(layout.factors(own, across), basis, strict=True):
            group.project_(precise, factor, side, out)
        layout.pack_vectors_(precise, own[layout.elements(across) :])
        request = AllReduce(own / at.world_size)
        averaged = yield request

        sent: Sent | None = None
        if at.feedback:
            for part in request.omitted:
                own[part].zero_()
            sent = Pieces(partial(_composed, layout, basis, own, side))
        mean = at.room(grad)
        out = mean if mean.dtype == precise.dtype else torch.empty_like(precise)
        _compose(layout, basis, averaged, side, out)
        if out is not mean:
            mean.copy_(out)
        memory = {
            f"{across}.{position}": factor.clone()
            for group, factors in layout.factors(averaged, across)
            for position, factor in zip(group.positions, factors, strict=True)
        }
        return Estimate(mean, sent, memory=memory)

    def _layout(self, n: int, shapes: Sequence[torch.Size]) -> Layout:
        share = 0.5 if self.step == "half" else 1.0
        return layout_of(n, tuple(shapes), self.rank, self.min_saving, share)

    def _start(self, layout: Layout, like: Tensor, at: At) -> tuple[str, list[Tensor]]:
        """Return the factors that the last step left and their side; random long ones at first."""
        side = SHORT if any(name.startswith(SHORT) for name in at.memory) else LONG
        if at.memory:
            return side, [
                torch.stack([at.memory[f"{side}.{p}"] for p in group.positions])
                for group in layout.groups
            ]
        flat = torch.randn(
            layout.elements(LONG),
            generator=at.generator("powersgd", like.device),
            dtype=like.dtype,
            device=like.device,
        )
        return LONG, [factor for _, factor in layout.factors(flat, LONG)]

    def _steer(
        self, layout: Layout, grad: Tensor, factors: list[Tensor], at: At
    ) -> Generator[Collective, Tensor, list[Tensor]]:
        """Return a basis of the short side: mean gradient times a factor, orthogonalised."""
        flat = grad.new_empty(layout.elements(SHORT))
        for (group, out), factor in zip(layout.factors(flat, SHORT), factors, strict=True):
            # Of gradients near the limits of fp32 the square must not overflow.
            group.project_(grad, unit_scale(factor), LONG, out)
        # A basis that hears some ranks in some of its parts only would spoil what all of them send.
        averaged = yield AllReduce(flat.div_(at.world_size), skippable=False)
        return [
            orthonormal(factor, self.orthogonalisation)
            for _, factor in layout.factors(averaged, SHORT)
        ]


def _compose(layout: Layout, basis: Sequence[Tensor], flat: Tensor, side: str, out: Tensor) -> None:
    """Write the bucket that a basis, its coordinates and the vectors describe into ``out``."""
    across = other(side)
    for (group, coordinates), factor in zip(layout.factors(flat, across), basis, strict=True):
        group.compose_(factor, coordinates, side, out)
    for part, values in layout.vector_pieces(flat[layout.elements(across) :]):
        out[part] = values


def _composed(
    layout: Layout, basis: Sequence[Tensor], flat: Tensor, side: str
) -> Iterator[tuple[slice, Tensor]]:
    """Yield what ``_compose`` writes piece by piece, each valid until the next."""
    across = other(side)
    for (group, coordinates), factor in zip(layout.factors(flat, across), basis, strict=True):
        yield from group.pieces(factor, coordinates, side)
    yield from layout.vector_pieces(flat[layout.elements(across) :])

"""QSGD (Alistarh et al., NeurIPS 2017): elements rounded at random to levels below a norm.

Letters: N world size, n elements of the bucket, s levels, v the norm that serves an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.collectives.reduction import MAX
from gradpilot.worker_agent.compressors._bits import (
    Layout,
    gathered_codes,
    parts,
    put_codes_,
)
from gradpilot.worker_agent.compressors._blockwise import (
    block_count,
    peaks,
    scaled,
    sum_scaled,
    times_blocks,
)
from gradpilot.worker_agent.compressors._dither import Dither
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import (
    COMPRESSORS,
    At,
    Compressor,
    Estimate,
    Rounds,
)
from gradpilot.worker_agent.compressors.sent import Pieces
from gradpilot.worker_agent.compressors.settings import choice, whole

_INT8_MAX = 127


@COMPRESSORS.register("qsgd")
@dataclass(frozen=True, kw_only=True)
class Qsgd(Compressor):
    """Sends ``round(s g / v)`` with random rounding, and v: unbiased.

    Over d elements that share a norm, the expected squared error is at most ``min(d / s^2, sqrt(d)
    / s)`` of their squared norm; 3 % for 127 levels over 512 elements. Since no element errs by
    more than ``v^2 / (4 s^2)``, it is also at most ``d / (4 s^2)``. Above 1, error feedback makes
    residuals grow step by step (7 levels over 512 elements: a thousandfold in 100 steps), so norms
    serve ``span`` elements each, and more than ``4 s^2`` are refused. ``norm=max`` obeys the same
    bounds but stays far below them, a single large element apart, so it may have longer spans.

    ``all_gather``: every rank has its own norms; codes take 2 bits (1 level), 4 (to 7) or 8.
    ``all_reduce``: the largest norm over ranks serves all, so that int8 codes can be added up;
    ``levels`` times N is at most 127.

    Attributes:
        levels: Levels s, sign apart.
        span: Consecutive elements that share a norm; the whole bucket if it is shorter.
        norm: ``l2`` as published, or ``max``, the largest magnitude.
        exchange: How codes travel, ``all_gather`` or ``all_reduce``.
    """

    name: ClassVar[str] = "qsgd"
    source: ClassVar[str] = "Alistarh et al., QSGD, NeurIPS 2017; here with error feedback"
    estimator = "unbiased"

    levels: int = whole(127, 1, _INT8_MAX)
    span: int = whole(512, 16, 1 << 31)
    norm: str = choice("l2", "max")
    exchange: str = choice("all_gather", "all_reduce")

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = 4 * self.levels**2
        if self.norm == "l2" and self.span > longest:
            raise ConfigError(
                f"qsgd: residuals would grow without bound: a span under norm l2 may have at most"
                f" 4 levels^2 = {longest} elements, got {self.span}; use more levels, a shorter"
                f" span, or norm=max"
            )

    @classmethod
    def ladder(cls) -> Sequence[Qsgd]:
        """Return settings under which residuals stay bounded."""
        return (
            cls(levels=127),
            cls(levels=7, norm="max"),
            cls(levels=15, norm="max", exchange="all_reduce"),
            cls(levels=7, norm="max", exchange="all_reduce"),
        )

    def check(self, world_size: int, collective: str) -> None:
        """Refuse more ranks than int8 can add up."""
        if self.exchange == "all_reduce" and self.levels * world_size > _INT8_MAX:
            raise ConfigError(
                f"qsgd: all_reduce adds codes in int8, so levels times ranks must be at most"
                f" {_INT8_MAX}, got {self.levels} times {world_size}"
            )

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return fp32 norms and packed codes (padded to 4 bytes), or norms and n int8 codes."""
        if self.exchange == "all_gather":
            return (WireRound("all_gather", self._layout(n, torch.float32).bytes),)
        return (
            WireRound("all_reduce", 4 * self._spans(n), skippable=False),
            WireRound("all_reduce", n, skippable=False),
        )

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Round to levels of the own norms, or of those that ranks agree on, and average."""
        if self.exchange == "all_gather":
            return (yield from self._gathered(grad, at))
        return (yield from self._summed(grad, at))

    def _gathered(self, grad: Tensor, at: At) -> Rounds:
        layout = self._layout(grad.numel(), precise_dtype(grad))
        message = layout.new(grad.device)
        norms = layout.scalars_of(message).copy_(self._norms(grad, layout.dtype))
        packed = layout.codes_of(message)
        scratch = layout.scratch(grad.device)
        dither = Dither(layout.n, at, dtype=layout.dtype, device=grad.device)
        steps = self._per_element(norms)
        for part in layout.parts:
            element = scratch[: part.length].copy_(grad[part.elements])
            self._round_(element, steps, dither, part.elements.start)
            put_codes_(packed, part, element.add_(self.levels).to(torch.uint8))

        return (yield from gathered_codes(layout, message, self._decode, grad, at))

    def _summed(self, grad: Tensor, at: At) -> Rounds:
        own = self._norms(grad, precise_dtype(grad)).nan_to_num_(torch.inf, torch.inf)

        norms = yield AllReduce(own, skippable=False, reduction=MAX)

        steps, units = self._per_element(norms), norms / self.levels
        dither = Dither(grad.numel(), at, dtype=norms.dtype, device=grad.device)
        cut = parts(grad.numel(), 8)
        codes = torch.empty_like(grad, dtype=torch.int8)
        scratch = norms.new_empty(cut[0].length)
        for part in cut:
            room = scratch[: part.length].copy_(grad[part.elements])
            self._round_(room, steps, dither, part.elements.start)
            codes[part.elements] = room
        kept = codes.clone() if at.feedback else None

        # Codes of some ranks only would be divided by N, which integers cannot be.
        total = yield AllReduce(codes, skippable=False)

        shares = units / at.world_size
        mean = sum_scaled(total[None], shares[None], self.span, at.room(grad))
        sent = None if kept is None else Pieces(partial(scaled, kept, units, self.span))
        return Estimate(mean, sent)

    def _spans(self, n: int) -> int:
        return block_count(n, self.span)

    def _layout(self, n: int, dtype: torch.dtype) -> Layout:
        width = next(w for w in (2, 4, 8) if 2 * self.levels + 1 <= 1 << w)
        return Layout(n, width, self._spans(n), dtype)

    def _norms(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm of every span; finite unless the gradient is not."""
        if self.norm == "max":
            norms = peaks(grad, self.span, dtype)
        else:
            whole_spans = grad.numel() // self.span * self.span
            rows = (grad[:whole_spans].view(-1, self.span), grad[whole_spans:].view(1, -1))
            norms = torch.cat(
                [torch.linalg.vector_norm(r, dim=1, dtype=dtype) for r in rows if r.numel()]
            )
        # Squares overflow from 1e19 on in fp32. Any larger norm rounds without bias, too; half of
        # the range, so that a mean over ranks that all have it does not overflow.
        return norms.clamp_(max=torch.finfo(dtype).max / 2)

    def _per_element(self, norms: Tensor) -> Tensor:
        """Return what an element is multiplied by to get its level."""
        # Squares that underflow, below 1e-22 in fp32, may leave a norm of zero.
        return self.levels / norms.clamp(min=torch.finfo(norms.dtype).tiny * 1024)

    def _round_(self, x: Tensor, steps: Tensor, dither: Dither, start: int) -> None:
        """Round the elements from ``start`` on to whole levels, in place."""
        # The product may exceed s by rounding.
        times_blocks(x, steps, self.span, start, x).clamp_(-self.levels, self.levels)
        dither.add_(x, start).floor_()

    def _decode(self, codes: Tensor, scalars: Tensor, out: Tensor, start: int) -> None:
        out.copy_(codes).sub_(self.levels)
        times_blocks(out, scalars / self.levels, self.span, start, out)

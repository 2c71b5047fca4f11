"""Eight bits an element with a scale for each block, under three ways to exchange them.

Letters: N world size, n elements of the bucket, B elements of a block, L largest level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllGather, AllReduce, AllToAll
from gradpilot.worker_agent.collectives.reduction import MAX
from gradpilot.worker_agent.compressors._bits import Layout
from gradpilot.worker_agent.compressors._blockwise import (
    block_count,
    peaks,
    pieces,
    row_peaks,
    scaled,
    scratch_for,
    sum_scaled,
)
from gradpilot.worker_agent.compressors._dither import Dither
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Estimate, Rounds
from gradpilot.worker_agent.compressors.sent import Pieces
from gradpilot.worker_agent.compressors.settings import choice, whole

_LARGEST_CODE = 127
CALIBRATED_LEVELS = 7
"""Levels to each side down to which training lost no steps: those of ``qsgd 7 levels`` in
``bench/results/efficiency.json``, with one scale for a whole bucket and random rounding, both of
which err more. Under ``all_reduce`` 18 ranks leave as many."""

MOST_GATHERED = 8
"""Most ranks whose payloads a policy may have gathered."""

# Fewer levels to each side than this, and a rank sends more noise than gradient.
_LEAST_LEVELS = 3
# Blocks below this peak are not sent but wait in the residual: 127 over it would overflow.
_LEAST_PEAK = 1e-36


@COMPRESSORS.register("int8")
@dataclass(frozen=True, kw_only=True)
class Int8(Compressor):
    """Sends ``round(L g / p)`` as int8, p the largest magnitude of a block.

    * ``all_reduce``: ranks agree on the largest p first, so that codes can be added up as they are.
      The sum has to fit int8, so every rank uses ``L = 127 // N`` levels to each side only: 15 for
      8 ranks. As fast as a dense all-reduce of a quarter of the bytes, and the coarsest.
    * ``all_gather``: own p, L = 127; every rank receives the codes of all others, N n bytes.
    * ``all_to_all``: own p, L = 127; rank j receives part j of all, averages it, and passes it on
      in 8 bits again. About the bytes of ``all_reduce``, with 127 levels twice. What the second
      rounding takes away stays with rank j, which adds it to its residual N-fold, so that nothing
      is lost: what counts as sent there is not quite what it had.

    Rounding to nearest leaves behind no more of any element than it had. Stochastic rounding is
    unbiased and leaves twice as much on average; where L is small it could leave more than there
    was, so ``all_reduce`` then serves fewer ranks.

    Skipping steps is not possible: sums of integers cannot be rescaled.

    Attributes:
        block: Elements B of a block, consecutive.
        rounding: ``nearest`` or ``stochastic``.
        exchange: How codes travel.
    """

    name: ClassVar[str] = "int8"
    source: ClassVar[str] = "block-wise absmax quantization, common practice; bounds derived"
    calibrated: ClassVar[bool] = True
    # Neither task of bench.efficiency lost steps beyond its noise (a step was worth 0.99 and 1.03
    # of a dense one), at gains above 0.999. Nothing is known of smaller ones, so a lost share of
    # the gradient is taken to cost as large a share of the step, more than in any family measured.
    efficiency_exponent = 1.0

    block: int = whole(256, 32, 4096)
    rounding: str = choice("nearest", "stochastic")
    exchange: str = choice("all_reduce", "all_gather", "all_to_all")

    @classmethod
    def ladder(cls) -> Sequence[Int8]:
        """Return the three exchanges."""
        return tuple(cls(exchange=way) for way in ("all_reduce", "all_gather", "all_to_all"))

    @property
    def most_ranks(self) -> int:
        """Return the largest N whose sums leave enough levels under ``all_reduce``.

        A stochastically rounded element errs by half a level, squared, at most: a block by
        ``B p^2 / 4 L^2``, which should stay below the p^2 that it holds at least.
        """
        least = _LEAST_LEVELS
        if self.rounding == "stochastic":
            least = max(least, math.ceil(math.sqrt(self.block) / 2.0))
        return _LARGEST_CODE // least

    def calibrated_for(self, world_size: int) -> bool:
        """Return whether sums leave ``CALIBRATED_LEVELS``, or all payloads fit two buckets.

        An all-gather holds those of all ranks, a quarter of a bucket each: with many ranks that is
        more than whoever attached an agent can have expected.
        """
        if self.exchange == "all_reduce":
            return _LARGEST_CODE // world_size >= CALIBRATED_LEVELS
        return self.exchange != "all_gather" or world_size <= MOST_GATHERED

    def check(self, world_size: int, collective: str) -> None:
        """Refuse more ranks than integer sums leave levels for."""
        if self.exchange == "all_reduce" and world_size > self.most_ranks:
            raise ConfigError(
                f"int8: all_reduce with block={self.block}, rounding={self.rounding} serves at most"
                f" {self.most_ranks} ranks, got {world_size}: sums in int8 leave"
                f" {_LARGEST_CODE // world_size} levels; use exchange=all_to_all"
            )

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return fp32 scales and n int8 codes.

        In one message padded to 4 bytes for ``all_gather``. For ``all_to_all`` a message for each
        rank, of its part in whole blocks, and one of the own part to all.
        """
        if self.exchange == "all_reduce":
            return (
                WireRound("all_reduce", 4 * block_count(n, self.block), skippable=False),
                WireRound("all_reduce", n, skippable=False),
            )
        if self.exchange == "all_gather":
            return (WireRound("all_gather", self._layout(n, torch.float32).bytes),)
        part = self._layout(self._share(n, ranks), torch.float32).bytes
        return (WireRound("all_to_all", ranks * part), WireRound("all_gather", part))

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Round to levels of the peaks that the exchange allows, and average."""
        if self.exchange == "all_reduce":
            return (yield from self._summed(grad, at))
        if self.exchange == "all_gather":
            return (yield from self._gathered(grad, at))
        return (yield from self._in_two_stages(grad, at))

    def _summed(self, grad: Tensor, at: At) -> Rounds:
        levels = _LARGEST_CODE // at.world_size
        # Integers cannot carry a NaN, so the peaks do.
        own = peaks(grad, self.block, precise_dtype(grad)).nan_to_num_(torch.inf, torch.inf)
        shared = yield AllReduce(own, skippable=False, reduction=MAX)

        codes = torch.empty_like(grad, dtype=torch.int8)
        scratch = scratch_for(grad.numel(), self.block, shared)
        self._encode(grad, shared, levels, codes, scratch, self._noise(grad, at), agreed=True)
        kept = codes.clone() if at.feedback else None
        total = yield AllReduce(codes, skippable=False)

        scales = shared / levels
        shares = scales / at.world_size
        mean = sum_scaled(total[None], shares[None], self.block, at.room(grad), scratch)
        sent = None if kept is None else Pieces(partial(scaled, kept, scales, self.block))
        return Estimate(mean, sent)

    def _gathered(self, grad: Tensor, at: At) -> Rounds:
        layout = self._layout(grad.numel(), precise_dtype(grad))
        message = torch.empty(layout.bytes, dtype=torch.uint8, device=grad.device)
        scratch = scratch_for(grad.numel(), self.block, layout.scalars_of(message))
        self._write(message, layout, grad, scratch, self._noise(grad, at))

        received = yield AllGather(message)

        mean = self._mean(layout, received, at.room(grad), scratch)
        sent = Pieces(partial(self._sent, layout, message)) if at.feedback else None
        return Estimate(mean, sent)

    def _in_two_stages(self, grad: Tensor, at: At) -> Rounds:
        n, ranks = grad.numel(), at.world_size
        share = self._share(n, ranks)
        layout = self._layout(share, precise_dtype(grad))
        spans = [slice(min(r * share, n), min((r + 1) * share, n)) for r in range(ranks)]

        # Part j to rank j. What pads a part has code and scale zero.
        messages = torch.empty(ranks, layout.bytes, dtype=torch.uint8, device=grad.device)
        scratch = scratch_for(ranks * share, self.block, layout.scalars_of(messages))
        noise = self._noise(grad, at)
        for cut, message in zip(spans, messages, strict=True):
            self._write(message, layout, grad[cut], scratch, noise, cut.start)
        received = yield AllToAll(messages.view(-1))

        # The mean of the own part, to all.
        part = torch.empty(share, dtype=layout.dtype, device=grad.device)
        self._mean(layout, received, part, scratch)
        message = torch.empty(layout.bytes, dtype=torch.uint8, device=grad.device)
        self._write(message, layout, part, scratch, self._noise(part, at, "second stage"))
        received = yield AllGather(message)

        mean = at.room(grad)
        for one, cut in zip(received, spans, strict=True):
            codes, scales = self._content(layout, one)
            sum_scaled(codes[None], scales[None], self.block, mean[cut], scratch)
        if not at.feedback:
            return Estimate(mean, None)
        for where, values in self._sent(layout, message):
            part[where].sub_(values)
        lost = part.mul_(ranks)
        sent = Pieces(partial(self._two_stage_pieces, messages, layout, spans, lost, at.rank))
        return Estimate(mean, sent)

    def _two_stage_pieces(
        self, messages: Tensor, layout: Layout, spans: list[slice], lost: Tensor, rank: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield what was sent piece by piece, the own part less what the second stage lost."""
        for number, (message, cut) in enumerate(zip(messages, spans, strict=True)):
            for where, values in self._sent(layout, message, cut.stop - cut.start):
                if number == rank:
                    values.sub_(lost[where])
                yield slice(cut.start + where.start, cut.start + where.stop), values

    def _share(self, n: int, ranks: int) -> int:
        """Return the elements of one of N equal parts, in whole blocks."""
        return block_count(block_count(n, self.block), ranks) * self.block

    def _layout(self, n: int, dtype: torch.dtype) -> Layout:
        return Layout(n, width=8, scalars=block_count(n, self.block), dtype=dtype)

    def _noise(self, x: Tensor, at: At, what: str = "dither") -> Dither | None:
        if self.rounding == "nearest":
            return None
        return Dither(x.numel(), at, what, dtype=precise_dtype(x), device=x.device)

    def _write(
        self,
        message: Tensor,
        layout: Layout,
        x: Tensor,
        scratch: Tensor,
        noise: Dither | None,
        start: int = 0,
    ) -> None:
        """Fill a message: scales and codes of a vector at most as long as the layout says, zeros.

        Args:
            message: ``layout.bytes`` bytes of any content.
            layout: Of the message.
            x: Elements.
            scratch: See ``scratch_for``.
            noise: For stochastic rounding.
            start: Where in the bucket the elements lie, for the noise.
        """
        n, scalars = x.numel(), layout.scalars_of(message)
        own = scalars[: block_count(n, self.block)]
        codes = message[layout.head : layout.head + n].view(torch.int8)
        self._encode(x, own, _LARGEST_CODE, codes, scratch, noise, start)
        own.div_(_LARGEST_CODE)
        scalars[own.numel() :].zero_()
        message[layout.head + n :].zero_()

    def _content(self, layout: Layout, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of a message, or of N messages by row; views."""
        return layout.codes_of(messages).view(torch.int8), layout.scalars_of(messages)

    def _mean(self, layout: Layout, messages: Tensor, out: Tensor, scratch: Tensor) -> Tensor:
        """Write the mean of what N messages stand for to ``out`` and return that."""
        codes, scales = self._content(layout, messages)
        return sum_scaled(codes, scales / len(messages), self.block, out, scratch)

    def _sent(
        self, layout: Layout, message: Tensor, n: int | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield what a message stands for piece by piece, or its first n elements."""
        codes, scales = self._content(layout, message)
        return scaled(codes[:n], scales, self.block)

    def _encode(
        self,
        x: Tensor,
        largest: Tensor,
        levels: float,
        codes: Tensor,
        scratch: Tensor,
        noise: Dither | None,
        start: int = 0,
        *,
        agreed: bool = False,
    ) -> None:
        """Write the codes of a vector.

        Args:
            x: Elements.
            largest: What is coded as ``levels``, one a block; written here unless ``agreed``, while
                a piece is in the cache: 1 ms of 7 for 1e7 elements on one thread.
            levels: Levels L.
            codes: int8, as long as ``x``.
            scratch: See ``scratch_for``, in the dtype of ``largest``.
            noise: For stochastic rounding.
            start: Where in the bucket the elements lie, for the noise.
            agreed: Whether ``largest`` is given.
        """
        if noise is not None:
            # A hair less, so that rounding the factor never lifts a peak above L: a clamp would be
            # one more pass. Noise reaches neither the next integer nor the last.
            levels *= 1.0 - 2.0 * torch.finfo(largest.dtype).eps
        for where, blocks in pieces(x.numel(), self.block, scratch.numel()):
            rows = x[where].view(blocks.stop - blocks.start, -1)
            peak = largest[blocks, None]
            if not agreed:
                peak.copy_(row_peaks(rows))
            z = scratch[: rows.numel()]
            factor = torch.where(peak > _LEAST_PEAK, levels / peak, 0.0)
            torch.mul(rows, factor, out=z.view_as(rows))
            if noise is None:
                z.round_()
            else:
                noise.add_(z, start + where.start).floor_()
            codes[where].copy_(z)

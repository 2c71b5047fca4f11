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
from gradpilot.worker_agent.compressors._bits import Layout, decoded, gathered_codes, mean_of
from gradpilot.worker_agent.compressors._blockwise import (
    block_count,
    peaks,
    scaled,
    times_blocks,
)
from gradpilot.worker_agent.compressors._dither import Dither
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Estimate, Rounds
from gradpilot.worker_agent.compressors.sent import Pieces, cut_length, cuts
from gradpilot.worker_agent.compressors.settings import choice, whole

_LARGEST_CODE = 127
CALIBRATED_LEVELS = 7
"""Levels to each side down to which training lost no steps: those of ``qsgd 7 levels`` in
``bench/results/efficiency.json``, with one scale for a whole bucket and random rounding, both of
which err more. Under ``all_reduce`` 18 ranks leave as many."""

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
        """Return whether sums leave ``CALIBRATED_LEVELS``."""
        return self.exchange != "all_reduce" or _LARGEST_CODE // world_size >= CALIBRATED_LEVELS

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
        self._encode(grad, shared, levels, codes, self._noise(grad, at))
        kept = codes.clone() if at.feedback else None
        total = yield AllReduce(codes, skippable=False)

        scales = shared / levels
        mean = times_blocks(total, scales / at.world_size, self.block, 0, at.room(grad))
        sent = None if kept is None else Pieces(partial(scaled, kept, scales, self.block))
        return Estimate(mean, sent)

    def _gathered(self, grad: Tensor, at: At) -> Rounds:
        layout = self._layout(grad.numel(), precise_dtype(grad))
        message = layout.new(grad.device)
        own = peaks(grad, self.block, layout.dtype)
        self._write(message, layout, grad, own, self._noise(grad, at))

        return (yield from gathered_codes(layout, message, self._decode, grad, at))

    def _in_two_stages(self, grad: Tensor, at: At) -> Rounds:
        n, ranks = grad.numel(), at.world_size
        share = self._share(n, ranks)
        layout = self._layout(share, precise_dtype(grad))
        spans = [slice(min(r * share, n), min((r + 1) * share, n)) for r in range(ranks)]

        # Part j to rank j. What pads a part has code and scale zero.
        messages = torch.zeros(ranks, layout.bytes, dtype=torch.uint8, device=grad.device)
        own = torch.split(peaks(grad, self.block, layout.dtype), layout.scalars)
        noise = self._noise(grad, at)
        for cut, message, part in zip(spans, messages, own, strict=False):
            self._write(message, layout, grad[cut], part, noise, cut.start)
        received = yield AllToAll(messages.view(-1))

        # The mean of the own part, to all.
        room = torch.empty(share, dtype=layout.dtype, device=grad.device)
        part = mean_of(layout, received, self._decode, room, ranks)
        message = layout.new(grad.device)
        second = self._noise(part, at, "second stage")
        self._write(message, layout, part, peaks(part, self.block, layout.dtype), second)
        received = yield AllGather(message)

        mean = self._read(received, layout, spans, at.room(grad))
        if not at.feedback:
            return Estimate(mean, None)
        for where, values in decoded(layout, message, self._decode):
            part[where].sub_(values)
        lost = part.mul_(ranks)
        sent = Pieces(partial(self._two_stage_pieces, messages, layout, spans, lost, at.rank))
        return Estimate(mean, sent)

    def _two_stage_pieces(
        self, messages: Tensor, layout: Layout, spans: list[slice], lost: Tensor, rank: int
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield what was sent piece by piece, the own part less what the second stage lost."""
        for number, (message, cut) in enumerate(zip(messages, spans, strict=True)):
            codes = layout.codes_of(message)[: cut.stop - cut.start].view(torch.int8)
            for where, values in scaled(codes, layout.scalars_of(message), self.block):
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
        own: Tensor,
        noise: Dither | None,
        start: int = 0,
    ) -> None:
        """Write scales and codes of a vector that is at most as long as the layout says."""
        torch.div(own, _LARGEST_CODE, out=layout.scalars_of(message)[: own.numel()])
        codes = layout.codes_of(message)[: x.numel()].view(torch.int8)
        self._encode(x, own, _LARGEST_CODE, codes, noise, start)

    def _read(self, messages: Tensor, layout: Layout, spans: list[slice], out: Tensor) -> Tensor:
        """Write what the messages of all parts stand for to ``out`` and return it."""
        for message, cut in zip(messages, spans, strict=True):
            into = out[cut]
            codes = layout.codes_of(message)[: into.numel()]
            self._decode(codes, layout.scalars_of(message), into, 0)
        return out

    def _encode(
        self,
        x: Tensor,
        largest: Tensor,
        levels: int,
        codes: Tensor,
        noise: Dither | None,
        start: int = 0,
    ) -> None:
        """Write the codes of a vector.

        Args:
            x: Elements.
            largest: What is coded as ``levels``, one a block.
            levels: Levels L.
            codes: int8, as long as ``x``.
            noise: For stochastic rounding.
            start: Where in the bucket the elements lie, for the noise.
        """
        factors = torch.where(largest > _LEAST_PEAK, levels / largest, 0.0)
        scratch = factors.new_empty(cut_length(x.numel(), x.device))
        for cut in cuts(x.numel(), x.device):
            own = x[cut]
            z = times_blocks(own, factors, self.block, cut.start, scratch[: own.numel()])
            if noise is None:
                z.round_()
            else:
                # A peak may exceed L by rounding.
                noise.add_(z, start + cut.start).floor_().clamp_(-levels, levels)
            codes[cut].copy_(z)

    def _decode(self, codes: Tensor, scalars: Tensor, out: Tensor, start: int) -> None:
        times_blocks(codes.view(torch.int8), scalars, self.block, start, out)

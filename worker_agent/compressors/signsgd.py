"""signSGD with majority vote (Bernstein et al., 2018): ranks vote on the sign of each element.

Letters: N world size, r rank, n elements of the bucket, p corrected gradient, V votes for plus less
votes for minus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllGather, AllReduce
from gradpilot.worker_agent.compressors._bits import (
    Layout,
    Part,
    get_codes,
    parts,
    put_codes_,
)
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import (
    COMPRESSORS,
    At,
    Compressor,
    Estimate,
    Rounds,
)
from gradpilot.worker_agent.compressors.settings import choice

_MOST_VOTES = 127
"""Votes that an int8 can count."""


@COMPRESSORS.register("signsgd")
@dataclass(frozen=True, kw_only=True)
class SignSgd(Compressor):
    """Gives ``scale sign(V)``, with the mean over ranks of ``||p||_1 / n`` as the scale.

    The published vote has no scale; with one, the result is a gradient that any optimizer can take,
    and a float carries a NaN to all ranks. Elements on which the vote is tied get 0.

    What rank r counts as sent is ``scale (sign(V) + sign(p_r) - V/N)`` (derived here). Its average
    over ranks is the result, so nothing is lost. Each rank takes back its own scaled sign, as
    EF-signSGD does, and all share what the vote itself lost. To count the bare result as sent would
    conserve too, but how ranks differ from each other would never leave the residuals, and they
    would grow without bound.

    ``all_gather`` moves N n / 8 bytes to each rank, ``all_reduce`` counts votes in int8, about 2 n
    bytes, which is less from 16 ranks on; up to 127 ranks.

    Attributes:
        exchange: How votes travel, ``all_gather`` or ``all_reduce``.
    """

    name: ClassVar[str] = "signsgd"
    source: ClassVar[str] = (
        "Bernstein et al., signSGD with Majority Vote, ICLR 2019; scale and feedback derived here"
    )
    estimator = "biased"
    gain_factor = 0.64

    exchange: str = choice("all_gather", "all_reduce")

    @classmethod
    def ladder(cls) -> Sequence[SignSgd]:
        """Return a member for each way of voting."""
        return (cls(), cls(exchange="all_reduce"))

    def check(self, world_size: int, collective: str) -> None:
        """Refuse more ranks than can be counted."""
        if self.exchange == "all_reduce" and world_size > _MOST_VOTES:
            raise ConfigError(
                f"signsgd: all_reduce counts the votes of at most {_MOST_VOTES} ranks,"
                f" got {world_size}; exchange=all_gather serves any number"
            )

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return an fp32 scale and n bits (padded to 4 bytes), or the scale and n int8 votes."""
        if self.exchange == "all_gather":
            return (WireRound("all_gather", Layout(n, width=1, scalars=1).bytes),)
        return (
            WireRound("all_reduce", 4, skippable=False),
            WireRound("all_reduce", n, skippable=False),
        )

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Average the scale, count the votes."""
        if self.exchange == "all_gather":
            return (yield from _gathered_votes(grad, at))
        return (yield from _summed_votes(grad, at))


def _gathered_votes(grad: Tensor, at: At) -> Rounds:
    layout = Layout(grad.numel(), width=1, scalars=1, dtype=precise_dtype(grad))
    message = layout.new(grad.device)
    packed = layout.codes_of(message)
    scratch = layout.scratch(grad.device)
    layout.scalars_of(message).copy_(_mean_magnitude(grad, layout.parts, scratch))
    for part in layout.parts:
        put_codes_(packed, part, grad[part.elements] < 0)

    gathered = yield AllGather(message)

    scale = layout.scalars_of(gathered).mean()
    rows = layout.codes_of(gathered)
    result = _Result(grad, at, scale, scratch)
    counts = torch.uint8 if at.world_size < 256 else torch.int16
    for part in layout.parts:
        own = get_codes(packed, part)
        against = torch.zeros_like(own, dtype=counts)
        for rank in range(at.world_size):
            against.add_(get_codes(rows[rank], part))
        votes = scratch[: part.length].copy_(against).mul_(-2).add_(at.world_size)
        result.take_(part, votes, own)
    return result.estimate()


def _summed_votes(grad: Tensor, at: At) -> Rounds:
    cut = parts(grad.numel(), 8)
    scratch = torch.empty(cut[0].length, dtype=precise_dtype(grad), device=grad.device)
    share = _mean_magnitude(grad, cut, scratch) / at.world_size
    # Before the gradient may be overwritten.
    negative = grad < 0

    scale = yield AllReduce(share.view(1), skippable=False)
    # Votes of some ranks only would be divided by N, which integers cannot be.
    votes = yield AllReduce(negative.to(torch.int8).mul_(-2).add_(1), skippable=False)

    result = _Result(grad, at, scale[0], scratch)
    for part in cut:
        counted = scratch[: part.length].copy_(votes[part.elements])
        result.take_(part, counted, negative[part.elements])
    return result.estimate()


def _mean_magnitude(grad: Tensor, cut: Sequence[Part], scratch: Tensor) -> Tensor:
    """Return ``||grad||_1 / n``, 0-d."""
    total = torch.zeros((), dtype=scratch.dtype, device=grad.device)
    for part in cut:
        total += scratch[: part.length].copy_(grad[part.elements]).abs_().sum()
    return total.div_(grad.numel())


class _Result:
    """Mean and sent part of one rank, filled part by part."""

    def __init__(self, grad: Tensor, at: At, scale: Tensor, scratch: Tensor) -> None:
        self._at = at
        self._scale = scale
        self._mean = at.room(grad)
        self._sent = torch.empty_like(grad, dtype=scratch.dtype) if at.feedback else None
        self._signs = torch.empty_like(scratch)

    def take_(self, part: Part, votes: Tensor, negative: Tensor) -> None:
        """Take the votes V of a part, as floats, and this rank's own (1 or True for minus)."""
        mean = torch.sign(votes, out=self._signs[: part.length]).mul_(self._scale)
        self._mean[part.elements] = mean
        if self._sent is not None:
            own = self._sent[part.elements].copy_(negative).mul_(-2).add_(1)
            own.sub_(votes, alpha=1 / self._at.world_size)
            own.mul_(self._scale).add_(mean)

    def estimate(self) -> Estimate:
        """Return the result."""
        return Estimate(self._mean, self._sent)

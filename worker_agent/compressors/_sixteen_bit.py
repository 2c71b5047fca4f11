"""What fp16 and bf16 share: one all-reduce in 16 bits.

Letters: N world size, c element of the corrected gradient, p its payload, s what was sent of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.compressors.none import dense_rounds
from gradpilot.worker_agent.compressors.sent import Pieces, cut_length, cuts


def largest_part(wire: torch.dtype, world_size: int) -> float:
    """Return the largest payload element whose sum over ranks stays finite.

    It lies below max/N because the cast and each of the N - 1 additions may round up by a factor of
    1 + u, u the unit roundoff: 2 % below for fp16 and 40 ranks. (At exactly max/N, 1024 ranks that
    each hold 65504/1024 do overflow in fp16.) Holds for every order of summation.
    """
    info = torch.finfo(wire)
    return float(info.max / world_size / (1.0 + info.eps / 2) ** world_size)


def sixteen_bit_rounds(grad: Tensor, at: At, wire: torch.dtype) -> Rounds:
    """Average a gradient by one all-reduce in ``wire``; the mean has the gradient's dtype.

    Divides by N at fp32 or better, then clamps and casts, so finite gradients give a finite mean;
    what rounding or clamping took away is left to the residual. NaN stays NaN. A bucket that has
    the wire's dtype already is averaged as it is.

    ``s = p N`` is exact (p has at most 11 significant bits). Rounding to nearest keeps s within a
    factor of 2 of c, or at 0, so ``c - s`` is exact too and ``s + residual == c`` bit for bit, for
    every N < 2^13, powers of two or not. Only clamped elements with |c| >= 2^28 / N, thousands of
    times beyond the range of fp16, may lose the last bit of c.
    """
    if grad.dtype == wire:
        return (yield from dense_rounds(grad, at))

    limit = largest_part(wire, at.world_size)
    payload = torch.empty_like(grad, dtype=wire)
    scratch = _scratch(grad)
    for cut in cuts(grad.numel(), grad.device):
        part = scratch[: cut.stop - cut.start]
        torch.div(grad[cut].to(part.dtype), at.world_size, out=part)
        payload[cut] = part.clamp_(-limit, limit)
    # Before the request, which consumes its payload.
    own = payload.clone() if at.feedback else None
    request = AllReduce(payload)

    total = yield request

    mean = at.room(grad).copy_(total)
    if own is None:
        return Estimate(mean, None)
    for omitted in request.omitted:
        own[omitted].zero_()
    return Estimate(mean, Pieces(partial(_decoded, own, at.world_size, scratch)))


def _scratch(grad: Tensor) -> Tensor:
    """Return room for the longest cut of a gradient, at fp32 or better."""
    return grad.new_empty(cut_length(grad.numel(), grad.device), dtype=precise_dtype(grad))


def _decoded(own: Tensor, ranks: int, scratch: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield a payload times N, piece by piece."""
    for cut in cuts(own.numel(), own.device):
        yield cut, scratch[: cut.stop - cut.start].copy_(own[cut]).mul_(ranks)

"""Natural compression (Horvath et al., 2019): elements rounded at random to powers of two.

Letters: N world size, n elements of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors._bits import Layout, gathered_codes, put_codes_
from gradpilot.worker_agent.compressors._dither import Dither
from gradpilot.worker_agent.compressors.base import (
    COMPRESSORS,
    At,
    Compressor,
    Rounds,
)

_MANTISSA_BITS = 23
_BIAS = 127
_SIGN = 128
"""Bit of a code that tells the sign; the other seven are the exponent."""
_TOP = 127
"""Code of the largest exponent that a message can hold."""
_LARGEST = 2.0**127
"""Largest power of two in fp32; what lies above is left to the residual."""


@COMPRESSORS.register("natural")
@dataclass(frozen=True, kw_only=True)
class Natural(Compressor):
    """Sends one byte an element: its sign and a power of two next to it.

    Of the powers of two below and above an element, the nearer one is likelier, so that the
    expectation is the element, to one part in 2^16. The variance is at most 1/8 of its square, and
    no error exceeds the element, so error feedback is safe. Where bits hold the exponent of fp32,
    adding noise to the mantissa and dropping it is that rounding, which is how it is done.

    The exponent has 8 bits in fp32. Seven suffice here, since they count from the largest element
    of the bucket downward: what is 2^126 times smaller becomes zero, unless it is below the normal
    numbers of fp32 anyway. fp64 is sent as fp32 would be.
    """

    name: ClassVar[str] = "natural"
    source: ClassVar[str] = (
        "Horvath et al., Natural Compression for Distributed Deep Learning, 2019"
    )
    estimator = "unbiased"
    exchange = "all_gather"

    @classmethod
    def ladder(cls) -> Sequence[Natural]:
        """Return the only member."""
        return (cls(),)

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one all-gather of an fp32 scale and n bytes, padded to 4 bytes."""
        return (WireRound("all_gather", Layout(n, width=8, scalars=1).bytes),)

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Gather all ranks' codes; the mean is that of the powers of two."""
        layout = Layout(grad.numel(), width=8, scalars=1)
        message = layout.new(grad.device)
        packed = layout.codes_of(message)
        floats = layout.scratch(grad.device)
        bits = torch.empty_like(floats, dtype=torch.int32)
        dither = Dither(layout.n, at, device=grad.device)
        top = _exponent_above(grad)
        layout.scalars_of(message).copy_(_power(top, grad))
        # By how much exponents are lowered to fit seven bits; 0 if all elements are below 1.
        lowered = (top - _TOP) << _MANTISSA_BITS
        for part in layout.parts:
            own = grad[part.elements]
            element, bit = floats[: part.length], bits[: part.length]
            element.copy_(own).clamp_(-_LARGEST, _LARGEST).abs_()
            torch.sub(element.view(torch.int32), lowered, out=bit)
            # Exponent plus mantissa as one number: whole part and fraction.
            element.copy_(bit).mul_(2.0**-_MANTISSA_BITS)
            codes = dither.add_(element, part.elements.start).clamp_(0, _TOP).to(torch.uint8)
            put_codes_(packed, part, codes.add_(own < 0, alpha=_SIGN))

        return (yield from gathered_codes(layout, message, _decode, grad, at))


def _exponent_above(grad: Tensor) -> Tensor:
    """Return the biased fp32 exponent of a power of two that no rounded element exceeds, 0-d."""
    low, high = torch.aminmax(grad)
    largest = torch.maximum(-low, high).float().clamp(max=_LARGEST)
    exponent = (largest.view(torch.int32) >> _MANTISSA_BITS) + 1
    # Not below the bias: zero has exponent 0, and must stay there.
    return exponent.clamp(_BIAS, _BIAS + _TOP)


def _power(exponent: Tensor, grad: Tensor) -> Tensor:
    """Return the power of two with this biased exponent as fp32; NaN for a gradient of NaN."""
    power = (exponent << _MANTISSA_BITS).view(torch.float32)
    return torch.where(grad[0].isnan(), torch.nan, power)


def _decode(codes: Tensor, scalars: Tensor, out: Tensor, start: int) -> None:
    # Widened with its sign, a code fills bits 0 to 31 as s ... s eeeeeee. Shifted, that is an fp32
    # without mantissa, but for a copy of the sign in the highest bit of the exponent.
    bits = out.view(torch.int32)
    bits.copy_(codes.view(torch.int8)).bitwise_left_shift_(_MANTISSA_BITS).bitwise_and_(~(1 << 30))
    out.mul_(scalars[0])

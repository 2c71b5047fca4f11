"""Sums of small signed integers that stop at the largest code instead of wrapping around.

No backend has them, so our own schedules carry them, and every hop saturates. A saturating sum
depends on the order: 7 + 7 - 7 is 0 one way and 7 the other where 7 is the limit. Each schedule
combines in a fixed order (the ring: slice c from rank c + 1 on around to rank c), and every rank
receives the finished slice, so all ranks still end with the same bits.

The range is symmetric, so that negating all payloads negates the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradpilot.worker_agent.collectives.reduction import Reduction

INT8_LIMIT = 127
"""Largest magnitude of an int8 code."""

NIBBLE_LIMIT = 7
"""Largest magnitude of a code of four bits."""


def pack_nibbles(codes: Tensor, out: Tensor) -> Tensor:
    """Pack two codes a byte: the first half of the codes in the low bits, the second in the high.

    Args:
        codes: int8, an even number of codes from -8 to 7; overwritten.
        out: int8, half as many bytes; returned.
    """
    low, high = codes.view(2, -1)
    torch.bitwise_left_shift(high, 4, out=out)
    return out.bitwise_or_(low.bitwise_and_(15))


def unpack_nibbles(packed: Tensor, out: Tensor) -> Tensor:
    """Undo ``pack_nibbles``.

    Args:
        packed: int8 bytes.
        out: int8, twice as many codes; returned.
    """
    low, high = out.view(2, -1)
    # Right shifts of signed integers repeat the sign.
    torch.bitwise_left_shift(packed, 4, out=low).bitwise_right_shift_(4)
    torch.bitwise_right_shift(packed, 4, out=high)
    return out


def _add_int8_(target: Tensor, incoming: Tensor) -> Tensor:
    """Add within -127 .. 127 without leaving int8: what is added is cut to what still fits."""
    least = target.clamp(max=0).neg_().sub_(INT8_LIMIT)
    most = target.clamp(min=0).neg_().add_(INT8_LIMIT)
    return target.add_(torch.clamp(incoming, least, most, out=least))


def _add_nibbles_(target: Tensor, incoming: Tensor) -> Tensor:
    """Add both halves of every byte within -7 .. 7."""
    high = target.bitwise_right_shift(4)
    high.add_(incoming.bitwise_right_shift(4)).clamp_(-NIBBLE_LIMIT, NIBBLE_LIMIT)
    low = incoming.bitwise_left_shift(4).bitwise_right_shift_(4)
    target.bitwise_left_shift_(4).bitwise_right_shift_(4).add_(low)
    target.clamp_(-NIBBLE_LIMIT, NIBBLE_LIMIT).bitwise_and_(15)
    return target.bitwise_or_(high.bitwise_left_shift_(4))


SATURATING_INT8 = Reduction("saturating int8 sum", _add_int8_, native=False)
"""Of int8 payloads with codes from -127 to 127."""

SATURATING_NIBBLES = Reduction("saturating 4-bit sum", _add_nibbles_, native=False)
"""Of int8 payloads that hold two codes from -7 to 7 a byte, see ``pack_nibbles``."""

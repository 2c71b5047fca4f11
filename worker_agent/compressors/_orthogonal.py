"""Orthonormal bases of low-rank factors, finite and complete whatever comes in.

Factors are stored with one direction a row: ``(batch, r, length)`` with r <= length. Both methods
return r orthonormal rows even of rows that are zero or depend on each other: the missing directions
are made up, so that a direction that died (a layer that was frozen for a while) can come back.
"""

from __future__ import annotations

import torch
from torch import Tensor

METHODS = ("qr", "gram_schmidt")

# A row that keeps less than this many units of roundoff of its length is made of rounding alone.
_LOST_ULPS = 16.0
_GOLDEN = 0.6180339887498949


def orthonormal(factors: Tensor, method: str) -> Tensor:
    """Return orthonormal rows whose span holds that of the given rows.

    Deterministic: ranks that hold the same bits get the same bits, given alike processors and as
    many threads.

    Args:
        factors: ``(batch, r, length)`` float32 or float64, r <= length; not changed.
        method: ``qr`` (Householder, a LAPACK or cuSOLVER call) or ``gram_schmidt`` (modified over
            blocks, matrix products only).

    Returns:
        A tensor of the same shape; NaN throughout a matrix that holds a NaN.
    """
    scaled = unit_scale(factors)
    if method == "qr":
        basis: Tensor = torch.linalg.qr(scaled.mT).Q.mT.contiguous()
        return basis
    return _gram_schmidt(scaled)


def unit_scale(factors: Tensor) -> Tensor:
    """Return the rows divided by their largest magnitude; spans stay, squares cannot overflow."""
    largest = factors.abs().amax(-1, keepdim=True)
    return factors / torch.where(largest == 0.0, 1.0, largest)


def _gram_schmidt(rows: Tensor) -> Tensor:
    """Orthogonalise row by row against all rows before it, in three passes.

    One pass leaves errors where most of a row cancels; the second removes them (Kahan and Parlett:
    "twice is enough"). The third is for replaced rows, which skip the first.
    """
    basis = torch.zeros_like(rows)
    count, length = rows.shape[-2:]
    lost = _LOST_ULPS * torch.finfo(rows.dtype).eps
    for number in range(count):
        row = rows[:, number : number + 1]
        before = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        row = _without(row, basis[:, :number])
        after = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        # Written so that NaN is kept.
        dead = after <= lost * before
        row = torch.where(dead, _spare(number, length, rows), row / after)
        for _ in range(2):
            row = _without(row, basis[:, :number])
            row = row / torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        basis[:, number : number + 1] = row
    return basis


def _without(row: Tensor, basis: Tensor) -> Tensor:
    """Return ``row`` less its projection onto orthonormal rows."""
    if basis.shape[-2] == 0:
        return row
    return torch.baddbmm(row, torch.bmm(row, basis.mT), basis, alpha=-1)


def _spare(number: int, length: int, like: Tensor) -> Tensor:
    """Return a row that no other row is likely to span: a chirp, another one for every number."""
    place = torch.arange(1, length + 1, dtype=torch.float64, device=like.device)
    turns = (place.square() * ((number + 1) * _GOLDEN)).frac()
    return (2.0 * torch.pi * turns).cos().to(like.dtype)

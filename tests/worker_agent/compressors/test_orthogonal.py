from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.worker_agent.compressors._orthogonal import METHODS, orthonormal, unit_scale

LIMITS = {torch.float32: 2e-6, torch.float64: 1e-14}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def deviation(basis: Tensor) -> float:
    """Return how far the rows are from orthonormal."""
    return float((basis @ basis.mT - torch.eye(basis.shape[-2])).abs().max())


def outside(rows: Tensor, basis: Tensor) -> float:
    """Return the share of the rows' norm that lies outside the span of a basis."""
    rows, basis = rows.double(), basis.double()
    rest = rows - rows @ basis.mT @ basis
    return float(torch.linalg.vector_norm(rest) / torch.linalg.vector_norm(rows))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 4), (2, 4, 1000), (1, 64, 300), (2, 64, 64)])
def test_rows_become_orthonormal_and_keep_their_span(
    method: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    rows = random(*shape, dtype=dtype)
    given_rows = rows.clone()
    basis = orthonormal(rows, method)
    assert torch.equal(rows, given_rows)
    assert (basis.shape, basis.dtype) == (rows.shape, dtype)
    assert basis.is_contiguous()
    assert deviation(basis) < LIMITS[dtype]
    assert outside(rows, basis) < 10 * LIMITS[dtype]


def degenerate(kind: str) -> Tensor:
    rows = random(2, 4, 6)
    if kind == "zero":
        rows.zero_()
    elif kind == "one zero row":
        rows[0, 1] = 0.0
    elif kind == "all alike":
        rows[:] = rows[:, :1].clone()
    elif kind == "alike up to rounding":
        rows[:] = rows[:, :1] * torch.tensor([1.0, 3.0, 1 / 3, 1 + 1e-7])[:, None]
    elif kind == "huge":
        rows *= 1e37
    elif kind == "denormal":
        rows *= 1e-41
    elif kind == "far apart":
        rows *= torch.tensor([1e30, 1.0, 1e-30, 1e-38])[:, None]
    elif kind == "nearly dependent":
        rows[:, 1:] = rows[:, :1] + 1e-4 * rows[:, 1:]
    elif kind == "unit vectors":
        rows[:] = torch.eye(4, 6).flip(0)
    return rows


KINDS = (
    "zero",
    "one zero row",
    "all alike",
    "alike up to rounding",
    "huge",
    "denormal",
    "far apart",
    "nearly dependent",
    "unit vectors",
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_comes_in_the_basis_is_complete(method: str, kind: str) -> None:
    basis = orthonormal(degenerate(kind), method)
    assert deviation(basis) < 2e-6
    for length in (1, 2, 4):  # as many rows as the space has dimensions
        square = degenerate(kind)[:, :length, :length]
        assert deviation(orthonormal(square, method)) < 2e-6


@pytest.mark.parametrize("method", METHODS)
def test_nan_in_one_matrix_stays_there(method: str) -> None:
    rows = random(2, 3, 5)
    rows[0] = torch.nan
    basis = orthonormal(rows, method)
    assert basis[0].isnan().all()
    assert deviation(basis[1:]) < 2e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 30), st.integers(0, 8), st.integers(0, 1000))
def test_methods_span_the_same_space(rank: int, more: int, true_rank: int, seed: int) -> None:
    length = rank + more
    left, right = random(rank, true_rank, seed=seed), random(true_rank, length, seed=seed + 1)
    rows = (left @ right)[None]
    bases = {method: orthonormal(rows, method) for method in METHODS}
    for basis in bases.values():
        assert deviation(basis) < 2e-6
        if rows.any():
            assert outside(rows, basis) < 2e-5
    if true_rank >= rank and torch.linalg.cond(rows) < 1e3:
        assert outside(bases["qr"], bases["gram_schmidt"]) < 1e-3


def test_unit_scale_keeps_directions_and_zeros() -> None:
    rows = torch.tensor([[2.0, -8.0], [0.0, 0.0], [1e30, 3e38], [torch.nan, 1.0]])
    scaled = unit_scale(rows)
    assert scaled[:2].tolist() == [[0.25, -1.0], [0.0, 0.0]]
    assert scaled[2, 1] == 1.0
    assert scaled[3].isnan().all()

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.worker_agent.compressors import _hadamard
from gradpilot.worker_agent.compressors._hadamard import Rotation, hadamard_
from gradpilot.worker_agent.compressors.base import At
from gradpilot.worker_agent.testing import relative_error

LONG = 1 << 17
"""Enough elements for matrix products."""


def normal(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def matrix(order: int) -> Tensor:
    """Return the matrix by its definition: -1 to the number of ones that i and j share."""
    return torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)]
    )


@pytest.fixture
def passes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hadamard, "_products_pay", lambda x: False)


@pytest.mark.parametrize("n", [64, LONG])
@pytest.mark.parametrize("block", [1, 2, 4, 8, 64])
def test_is_the_matrix_of_the_definition(n: int, block: int) -> None:
    x = normal(n)
    expected = x.view(-1, block) @ matrix(block)
    assert relative_error(hadamard_(x.clone(), block), expected.view(-1)) < 1e-6


@pytest.mark.parametrize("block", [2, 32, 512, 1024, 4096, LONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeps_the_norm_and_is_its_own_inverse(block: int, dtype: torch.dtype) -> None:
    x = normal(LONG).to(dtype)
    y = hadamard_(x.clone(), block)
    norm = float(torch.linalg.vector_norm(x.double()))
    assert float(torch.linalg.vector_norm(y.double())) == pytest.approx(norm * block**0.5, rel=1e-6)
    limit = 1e-6 if dtype == torch.float32 else 1e-14
    assert relative_error(hadamard_(y, block) / block, x) < limit


@pytest.mark.parametrize("block", [8, 256, 1024, LONG])
def test_products_and_passes_agree_bit_for_bit_on_codes(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What all ranks decode must not depend on who multiplies, with how many threads.
    codes = torch.randint(-127, 128, (LONG,), generator=torch.Generator().manual_seed(1)).float()
    products = hadamard_(codes.clone(), block)
    monkeypatch.setattr(_hadamard, "_products_pay", lambda x: False)
    assert torch.equal(products, hadamard_(codes, block))


def test_stays_exact_where_products_may_drop_bits() -> None:
    x = normal(LONG)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert not _hadamard._products_pay(x)
        y = hadamard_(x.clone(), 1024)
    finally:
        torch.set_float32_matmul_precision(before)
    assert _hadamard._products_pay(x)
    assert relative_error(hadamard_(y, 1024) / 1024, x) < 1e-6


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 99))
@settings(deadline=None, max_examples=30)
def test_rotation_is_undone_and_keeps_lengths(log: int, count: int, step: int) -> None:
    block = 1 << log
    x = normal(block * count, step)
    rotation = Rotation(block, At(0, 2, step))
    y = rotation.turn_(x.clone())
    for before, after in zip(x.view(count, block), y.view(count, block), strict=True):
        length = float(torch.linalg.vector_norm(before)) * block**0.5
        assert float(torch.linalg.vector_norm(after)) == pytest.approx(length, rel=1e-5)
    assert relative_error(rotation.turn_back_(y) / block, x) < 1e-5


def test_ranks_rotate_alike_and_steps_differ() -> None:
    x = normal(256)
    here, there, later = (
        Rotation(256, At(rank, 2, step, "b", 3)).turn_(x.clone())
        for rank, step in ((0, 0), (1, 0), (0, 1))
    )
    assert torch.equal(here, there)
    assert not torch.equal(here, later)


def kurtosis(x: Tensor) -> float:
    centred = x.double() - x.double().mean()
    return float(centred.pow(4).mean() / centred.square().mean().square())


def test_longer_blocks_spread_spikes_further() -> None:
    n = 1 << 16
    x = normal(n) * 0.01
    x[torch.randperm(n, generator=torch.Generator().manual_seed(0))[:64]] = 10.0
    found = [kurtosis(x)]
    for block in (4, 16, 64, 256, 1024, n):
        found.append(kurtosis(Rotation(block, At(0, 1, 0)).turn_(x.clone())))
    assert found == sorted(found, reverse=True)
    assert found[0] > 900.0
    assert found[-1] == pytest.approx(3.0, abs=0.1)


def test_a_vector_that_repeats_itself_is_spread_too(passes_only: None) -> None:
    # Signs come from a table shorter than the block; what repeats with its length must not gather
    # in the elements that a transform of the table's length has.
    x = normal(1 << 16).repeat(8)
    y = Rotation(x.numel(), At(0, 1, 0)).turn_(x.clone()).view(8, -1)
    energies = y.double().square().sum(1)
    assert float(energies.max() / energies.sum()) < 0.9
    assert float(energies.min()) > 0.0

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.worker_agent.compressors._dither import Dither, add_dither_
from gradpilot.worker_agent.compressors.base import At

BLOCK = 1 << 16


def noise(n: int, *, rank: int = 0, step: int = 0, what: str = "dither") -> Tensor:
    return add_dither_(torch.zeros(n), At(rank, 2, step, "b", 7), what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lies_strictly_between_integers(dtype: torch.dtype) -> None:
    for level in (-128.0, -127.0, -1.0, 0.0, 5.0, 127.0):
        x = torch.full((3 * BLOCK + 5,), level, dtype=dtype)
        assert add_dither_(x, At(0, 2, 0)) is x
        assert bool((x > level).all())
        assert bool((x < level + 1.0).all())


def test_is_uniform() -> None:
    u = noise(BLOCK).sort().values
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) at p = .001.
    distance = (u - torch.linspace(0.0, 1.0, BLOCK)).abs().max()
    assert float(distance) < 1.95 / BLOCK**0.5


def test_place_decides_and_every_place_differs() -> None:
    first = noise(1000)
    assert torch.equal(first, noise(1000))
    for other in (noise(1000, rank=1), noise(1000, step=1), noise(1000, what="other")):
        assert abs(correlation(first, other)) < 0.12  # 3.8 / sqrt(1000)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def test_blocks_do_not_repeat_each_other() -> None:
    u = noise(4 * BLOCK).view(4, BLOCK)
    for other in u[1:]:
        assert abs(correlation(u[0], other)) < 0.015  # 3.8 / sqrt(65536)
    # As long as no two blocks start at the same entry, each has entries that the first has not.
    assert all(int((u[0] == other).sum()) < BLOCK // 100 for other in u[1:])


@given(st.lists(st.integers(0, 2 * BLOCK), min_size=1, max_size=4))
@settings(deadline=None, max_examples=25)
def test_parts_get_what_the_whole_would(lengths: list[int]) -> None:
    n = sum(lengths)
    if n == 0:
        return
    dither, x, start = Dither(n, At(1, 2, 3, "b", 7)), torch.zeros(n), 0
    for length in lengths:
        dither.add_(x[start : start + length], start)
        start += length
    assert torch.equal(x, noise(n, rank=1, step=3))


@pytest.mark.parametrize("n", [257, BLOCK + 300])
def test_rounding_is_unbiased_for_every_element(n: int) -> None:
    steps = 400
    x = torch.linspace(-3.0, 3.0, n)
    total = torch.zeros(n)
    for step in range(steps):
        total += add_dither_(x.clone(), At(0, 2, step)).floor_()
    # Each element by its own deviation; over all of them squared errors come to their expectation.
    fraction = x - x.floor()
    expected = (fraction * (1.0 - fraction) / steps).sum()
    error = (total / steps - x).square()
    assert float(error.sum()) == pytest.approx(float(expected), rel=0.3)
    assert float(error[-257:].max().sqrt()) < 4.5 * 0.5 / steps**0.5


@pytest.mark.parametrize(("bits", "expected"), [(2, 0.815), (3, 0.148), (4, 0.0324), (8, 0.00024)])
def test_error_of_the_published_grid_on_normal_values(bits: int, expected: float) -> None:
    # 2^q levels over 3.29719 standard deviations to each side, as the published THC has them.
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(bits))
    delta = 2 * 3.29719 / (2**bits - 1)
    levels = ((x + 3.29719) / delta).clamp(0, 2**bits - 1)
    rounded = add_dither_(levels, At(0, 1, 0)).floor() * delta - 3.29719
    error = (rounded - x).square().sum() / x.square().sum()
    assert float(error) == pytest.approx(expected, rel=0.05)

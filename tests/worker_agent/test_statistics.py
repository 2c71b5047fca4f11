from __future__ import annotations

import math

import pytest
import torch

from gradpilot.protos.messages import ENERGY_RATIOS, MAGNITUDE_BINS, MAGNITUDE_LOW
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.statistics import energy_curve, gain, magnitudes, squared_norm


def _exact(x: torch.Tensor, ratio: float) -> float:
    energy = x.double().square().sort(descending=True).values
    return float(energy[: max(int(ratio * x.numel()), 1)].sum() / energy.sum())


@pytest.mark.parametrize("n", [1, 7, 1000, 60_000])
def test_unsampled_curves_are_the_gain_of_exact_top_k(n: int) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    curve = energy_curve(x)
    for ratio, share in zip(ENERGY_RATIOS, curve, strict=True):
        assert share == pytest.approx(_exact(x, ratio), abs=1e-6)


def test_sampled_curves_are_close_and_monotone() -> None:
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0)).pow_(3)
    curve = energy_curve(x)
    assert list(curve) == sorted(curve)
    assert curve[-1] == pytest.approx(1.0)
    for ratio, share in zip(ENERGY_RATIOS, curve, strict=True):
        if ratio >= 0.001:
            assert share == pytest.approx(_exact(x, ratio), rel=0.1)


def test_gaussian_gains_are_those_of_theory() -> None:
    # Energy of N(0,1) beyond |x| > t, for the t that keeps a share c; known values.
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(2))
    known = {0.12: 0.490, 0.03: 0.194, 0.001: 0.0127}
    curve = dict(zip(ENERGY_RATIOS, energy_curve(x), strict=True))
    for ratio, value in known.items():
        assert curve[ratio] == pytest.approx(value, rel=0.08), ratio


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_what_has_no_curve_gives_none(value: float) -> None:
    assert energy_curve(torch.full((100,), value)) == ()


def test_gain_is_the_squared_form() -> None:
    corrected = torch.tensor([3.0, 4.0])
    norm = squared_norm(corrected)
    assert norm == pytest.approx(25.0)
    assert gain(Sparse(torch.tensor([1]), torch.tensor([4.0])), norm) == pytest.approx(16 / 25)
    assert gain(torch.tensor([3.0, 0.0]), norm) == pytest.approx(9 / 25)
    assert gain(None, norm) == 1.0
    assert gain(torch.zeros(2), 0.0) == 1.0


def test_magnitudes_are_counted_by_octave() -> None:
    x = torch.tensor([1.0, -1.5, 2.0, 0.3, 1e-30, 0.0, 1e9])
    counts = magnitudes(x)
    assert len(counts) == MAGNITUDE_BINS
    assert sum(counts) == 7
    filled = {i + MAGNITUDE_LOW: n for i, n in enumerate(counts) if n}
    assert filled == {0: 2, 1: 1, -2: 1, MAGNITUDE_LOW: 2, MAGNITUDE_LOW + MAGNITUDE_BINS - 1: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sampled_magnitudes_have_the_shape_of_all(dtype: torch.dtype) -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(3)).pow_(3).to(dtype)
    counts = magnitudes(x)
    octaves = x.double().abs().log2().floor().clamp(MAGNITUDE_LOW)
    for i, count in enumerate(counts):
        exact = float((octaves == MAGNITUDE_LOW + i).double().mean())
        assert count / sum(counts) == pytest.approx(exact, abs=0.01)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_has_no_magnitudes(value: float) -> None:
    assert magnitudes(torch.tensor([1.0, value])) == ()

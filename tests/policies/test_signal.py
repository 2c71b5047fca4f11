from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.policies.signal import MOST, shrink_factor, signal_to_noise


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("ranks", [2, 8])
def test_finds_the_ratio_that_was_put_in(ratio: float, ranks: int) -> None:
    generator = np.random.default_rng(0)
    n = 200_000
    mu = generator.normal(0, np.sqrt(ratio), n)
    grads = mu + generator.normal(0, 1, (ranks, n))
    found = signal_to_noise(
        float((grads**2).sum(1).mean()), float((grads.mean(0) ** 2).sum()), ranks
    )
    assert found == pytest.approx(ratio, rel=0.1)


def test_identical_ranks_have_no_noise_and_pure_noise_no_signal() -> None:
    assert signal_to_noise(4.0, 4.0, 4) == MOST
    assert signal_to_noise(4.0, 1.0, 4) == 0.0


@pytest.mark.parametrize(
    ("gradient_sq", "mean_sq", "ranks"),
    [(1.0, 1.0, 1), (0.0, 0.0, 4), (float("nan"), 1.0, 4), (1.0, -1.0, 4), (float("inf"), 1.0, 4)],
)
def test_what_cannot_be_told_is_not(gradient_sq: float, mean_sq: float, ranks: int) -> None:
    assert signal_to_noise(gradient_sq, mean_sq, ranks) == -1.0


@pytest.mark.parametrize("ratio", [0.05, 0.3, 2.0])
def test_the_factor_errs_least_to_the_true_mean(ratio: float) -> None:
    generator = np.random.default_rng(1)
    contributions, n = 3, 100_000
    mu = generator.normal(0, np.sqrt(ratio), n)
    partial = (mu + generator.normal(0, 1, (contributions, n))).mean(0)
    factors = np.arange(1, 21) / 20
    errors = [((f * partial - mu) ** 2).sum() for f in factors]
    assert shrink_factor(ratio, contributions) == pytest.approx(factors[int(np.argmin(errors))])


@settings(deadline=None, max_examples=50)
@given(ratio=st.floats(-1, MOST), contributions=st.integers(0, 64))
def test_the_factor_is_usable_whatever_comes(ratio: float, contributions: int) -> None:
    factor = shrink_factor(ratio, contributions)
    assert 0.0 < factor <= 1.0
    assert shrink_factor(-1.0, contributions) == 1.0

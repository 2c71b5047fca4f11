from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradpilot.policies.base import BucketState
from gradpilot.policies.gain import (
    BARE_POWER,
    GainModel,
    efficiency,
    gaussian_gain,
    laplace_gain,
    skip_efficiency,
    skip_gain,
)
from gradpilot.policies.history import GainRecord
from gradpilot.protos.messages import BF16, ENERGY_RATIOS, Family, Option
from tests.policies import scenario

TOPK = Family("topk", (), ("allgather",), (), "energy", 1.0, 0.2)
BUCKETS = scenario.layout((100, 300)).buckets
KNOWN = BucketState(gradient_sq=1.0, energy=scenario.ENERGY)


@pytest.mark.parametrize(
    ("ratio", "gaussian", "laplace", "tolerance"),
    [(0.1, 0.4393, 0.5954, 0.01), (0.01, 0.0845, 0.1621, 0.03), (0.001, 0.0127, 0.0318, 0.1)],
)
def test_closed_forms(ratio: float, gaussian: float, laplace: float, tolerance: float) -> None:
    assert gaussian_gain(ratio) == pytest.approx(gaussian, rel=0.004)
    assert laplace_gain(ratio) == pytest.approx(laplace, rel=0.004)
    rng = np.random.default_rng(0)
    for expected, drawn in (
        (gaussian, rng.normal(size=1_000_000)),
        (laplace, rng.laplace(size=1_000_000)),
    ):
        squares = np.sort(drawn**2)[::-1]
        gain = squares[: int(ratio * 1e6)].sum() / squares.sum()
        assert gain == pytest.approx(expected, rel=tolerance)


def test_further_values_of_the_gaussian() -> None:
    assert gaussian_gain(0.033) == pytest.approx(0.2082, rel=0.003)
    assert gaussian_gain(0.011) == pytest.approx(0.0910, rel=0.003)
    assert gaussian_gain(0.004) == pytest.approx(0.0405, rel=0.003)


@given(st.floats(0, 1), st.floats(0, 1))
def test_closed_forms_are_monotone(a: float, b: float) -> None:
    for form in (gaussian_gain, laplace_gain):
        low, high = form(min(a, b)), form(max(a, b))
        assert 0 <= low <= high + 1e-12 <= 1 + 1e-12


def test_knots_come_back() -> None:
    gains = GainModel(BUCKETS, [KNOWN] * 2).gain(TOPK, np.array(ENERGY_RATIOS))
    assert gains[:, 0] == pytest.approx(scenario.ENERGY)


def test_no_curve_means_gaussian_and_one_curve_serves_all() -> None:
    ratios = np.array([0.001])
    assert GainModel(BUCKETS, [BucketState()] * 2).gain(TOPK, ratios)[0, 0] == pytest.approx(
        gaussian_gain(0.001)
    )
    gains = GainModel(BUCKETS, [BucketState(), KNOWN]).gain(TOPK, ratios)
    assert gains[0, 0] == gains[0, 1] == pytest.approx(0.06)


def test_gain_models_of_other_families() -> None:
    ratios = np.array([0.01, 0.1])
    model = GainModel(BUCKETS, [KNOWN] * 2)
    by_ratio = Family("randomk", (), ("native",), (), "ratio")
    constant = Family("int8", (), ("native",), (), "constant", 0.9)
    assert model.gain(by_ratio, ratios)[:, 0] == pytest.approx([0.01, 0.1])
    assert model.gain(constant, ratios) == pytest.approx(0.9)


def test_measured_gain_corrects_its_own_family_only() -> None:
    states = [BucketState(gain=0.08, gradient_sq=1.0, energy=scenario.ENERGY)] * 2
    option = Option("topk", 0.01, "allgather")
    other = Family("other", (), ("allgather",), (), "energy")
    model = GainModel(BUCKETS, states, [option] * 2, [TOPK, other])
    plain = GainModel(BUCKETS, states)
    at = np.array([0.01, 0.1])
    assert model.gain(TOPK, at)[0] == pytest.approx(0.08)
    assert (model.gain(TOPK, at)[1] < plain.gain(TOPK, at)[1]).all()
    assert (model.gain(other, at) == plain.gain(other, at)).all()
    skipping = Option("topk", 0.01, "ring", 3)
    unmoved = GainModel(BUCKETS, states, [skipping] * 2, [TOPK])
    assert (unmoved.gain(TOPK, at) == plain.gain(TOPK, at)).all()


def test_what_was_learned_corrects_a_family_that_is_not_in_use() -> None:
    records = [GainRecord("topk", (), 0.01, 0.5, 100)]
    at = np.array([0.01, 0.1])
    plain = GainModel(BUCKETS, [KNOWN] * 2).gain(TOPK, at)
    model = GainModel(BUCKETS, [KNOWN] * 2, [BF16] * 2, [TOPK], records, 100)
    assert model.gain(TOPK, at) == pytest.approx(0.5 * plain)
    assert (model.predicted(TOPK, at) == plain).all()
    faded = GainModel(BUCKETS, [KNOWN] * 2, [BF16] * 2, [TOPK], records, 10_000)
    assert (faded.gain(TOPK, at) == plain).all()


def test_weights() -> None:
    def weights(*squares: float) -> list[float]:
        states = [BucketState(gradient_sq=s) for s in squares]
        return list(GainModel(BUCKETS, states).weights)

    assert weights(3.0, 1.0) == pytest.approx([0.75, 0.25])
    assert weights(-1.0, -1.0) == pytest.approx([0.25, 0.75])
    assert weights(1.0, -1.0) == pytest.approx([0.25, 0.75])
    assert weights(math.nan, 0.0) == pytest.approx([0.25, 0.75])


def test_efficiency_of_skipping_depends_on_the_divisor() -> None:
    for divisor in ("skip", "drop", "shrink"):
        worth = [skip_efficiency(skip_gain("ring", 4, s), divisor) for s in range(4)]
        assert worth[0] == 1.0
        assert worth == sorted(worth, reverse=True)
    # Measured with 2 of 4 skipped: 0.72 and 0.58 with divisor N, 0.47 and 0.44 with N - S.
    assert skip_efficiency(0.5, "skip") == pytest.approx((0.72 * 0.58) ** 0.5, rel=0.1)
    assert skip_efficiency(0.5, "drop") == pytest.approx((0.47 * 0.44) ** 0.5, rel=0.15)


def test_share_that_is_heard() -> None:
    assert [skip_gain("ring", 8, s) for s in (0, 1, 4, 7)] == [1, 7 / 8, 1 / 2, 1 / 8]
    assert [skip_gain("halving_doubling", 8, s) for s in range(4)] == [1, 1 / 2, 1 / 4, 1 / 8]
    assert [skip_gain("tree", 6, s) for s in range(4)] == [1, 1 / 2, 1 / 3, 1 / 6]
    # Never less than what the schedules can do: no power of two, beyond the last step, no skip.
    assert skip_gain("halving_doubling", 6, 2) == 1
    assert skip_gain("ring", 8, 9) == skip_gain("tree", 8, 9) == 1 / 8
    assert skip_gain("native", 8, 3) == skip_gain("allgather", 1, 0) == 1


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=13, max_size=13),
    st.floats(-1, 2),
    st.floats(0.01, 2),
    st.floats(0, 2),
)
def test_gain_is_monotone_and_bounded(
    energy: list[float], measured: float, factor: float, exponent: float
) -> None:
    family = Family("topk", (), ("allgather",), (), "energy", factor, exponent)
    states = [BucketState(gain=measured, energy=tuple(energy))] * 2
    model = GainModel(BUCKETS, states, [Option("topk", 0.01, "allgather")] * 2, [family])
    gains = model.gain(family, np.geomspace(1e-6, 1, 50))
    assert ((gains > 0) & (gains <= 1)).all()
    assert (np.diff(gains, axis=0) >= -1e-12).all()
    worth = efficiency(gains, exponent)
    assert ((worth > 0) & (worth <= 1)).all()


# --- under error feedback ------------------------------------------------------------------------


def with_residual(residual: float) -> BucketState:
    return BucketState(gradient_sq=1.0, residual_sq=residual, energy=scenario.ENERGY)


def test_of_a_bare_gradient_less_is_expected_than_its_largest_elements_hold() -> None:
    """The residual will hold what is not sent, so under compression they hold less."""
    at = np.array([0.01])
    plain = GainModel(BUCKETS, [KNOWN] * 2).gain(TOPK, at)[0, 0]
    for residual, power in ((0.0, BARE_POWER), (0.25, 2.0), (0.5, 1.0), (0.9, 1.0)):
        gain = GainModel(BUCKETS, [with_residual(residual)] * 2).gain(TOPK, at)[0, 0]
        assert gain == pytest.approx(plain**power)


def test_what_is_measured_in_use_is_not_lowered() -> None:
    states = [BucketState(0.0, 0.2, 1.0, 0.0, scenario.ENERGY)] * 2
    option = Option("topk", 0.01, "allgather")
    model = GainModel(BUCKETS, states, [option] * 2, [TOPK])
    assert model.gain(TOPK, np.array([0.01]))[0] == pytest.approx([0.2, 0.2])


def test_weights_are_those_of_the_gradient_without_its_residual() -> None:
    states = [with_residual(0.5), BucketState(gradient_sq=3.0, residual_sq=2.5)]
    assert GainModel(BUCKETS, states).weights == pytest.approx([0.5, 0.5])


def test_a_remembered_miss_makes_the_same_choice_impossible() -> None:
    missed = GainRecord("topk", (), 0.01, 1.5, 900, missed=0.28)
    model = GainModel(BUCKETS, [KNOWN] * 2, [BF16] * 2, [TOPK], [missed], 1000)
    gain = model.gain(TOPK, np.array([0.005, 0.01])) @ model.weights
    assert (gain < 0.28).all()

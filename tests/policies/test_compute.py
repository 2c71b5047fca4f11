from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradpilot.policies.compute import ComputeModel, bracket
from gradpilot.protos.messages import ComputeSample

TOPK = ("topk", ())


def sample(ratio: float, elements: int, seconds: float, after: float = 0.0) -> ComputeSample:
    return ComputeSample("topk", (), ratio, elements, seconds, after)


def seconds(model: ComputeModel, ratio: float, elements: float) -> float:
    return float(model.seconds(TOPK, np.array([ratio]), np.array([elements]))[0][0, 0])


def test_measured_points_come_back() -> None:
    model = ComputeModel([sample(0.01, 1000, 1e-3), sample(0.1, 1000, 2e-3)])
    assert seconds(model, 0.01, 1000) == pytest.approx(1e-3)
    assert seconds(model, 0.1, 1000) == pytest.approx(2e-3)
    assert 1e-3 < seconds(model, 0.03, 1000) < 2e-3
    assert seconds(model, 0.5, 1000) == pytest.approx(2e-3)


def test_median_of_the_last_five() -> None:
    old = [sample(0.01, 1000, 9.0)] * 20
    new = [sample(0.01, 1000, t) for t in (1e-3, 1e-3, 5.0, 1e-3, 1e-3)]
    assert seconds(ComputeModel(old + new), 0.01, 1000) == pytest.approx(1e-3)


def test_grows_in_proportion_beyond_one_size() -> None:
    model = ComputeModel([sample(0.01, 1000, 1e-3)])
    assert seconds(model, 0.01, 10_000) == pytest.approx(1e-2)
    assert seconds(model, 0.01, 100) == pytest.approx(1e-4)


def test_follows_the_line_beyond_two_sizes() -> None:
    model = ComputeModel([sample(0.01, 1000, 2e-3), sample(0.01, 2000, 3e-3)])
    assert seconds(model, 0.01, 4000) == pytest.approx(5e-3)
    assert seconds(model, 0.01, 500) == pytest.approx(1.5e-3)


def test_nothing_measured() -> None:
    model = ComputeModel([sample(0.01, 1000, math.nan), sample(0.01, 1000, -1.0)])
    assert TOPK not in model
    assert math.isnan(seconds(model, 0.01, 1000))


def test_zero_cost_stays_zero() -> None:
    assert seconds(ComputeModel([sample(1.0, 1000, 0.0)]), 1.0, 500) == 0


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.builds(
            sample,
            st.floats(1e-4, 1),
            st.integers(1, 10**8),
            st.floats(0, 10),
            st.floats(0, 10),
        ),
        min_size=1,
        max_size=12,
    ),
    st.floats(1e-4, 1),
)
def test_more_elements_never_cost_less(samples: list[ComputeSample], ratio: float) -> None:
    elements = np.geomspace(1, 1e9, 60)
    for table in ComputeModel(samples).seconds(TOPK, np.array([ratio]), elements):
        assert np.isfinite(table).all()
        assert (table >= 0).all()
        assert (np.diff(table[0]) >= -1e-6 * table[0, 1:] - 1e-12).all()


def test_knots_that_coincide_give_either_of_them() -> None:
    low, high, share = bracket(np.log([1e-4, 1e-4 * (1 + 1e-16), 0.1]), np.log([1e-4, 1.0]))
    assert np.isfinite(share).all()
    assert (high == low + 1).all()


@pytest.mark.parametrize("odd", [100.0, 0.0, math.nan, math.inf, -1.0])
def test_one_odd_window_does_not_decide(odd: float) -> None:
    usual = [sample(0.01, 1000, 1e-3, 1e-4)]
    for number in (1, 2, 3):
        model = ComputeModel([*usual * number, sample(0.01, 1000, odd, odd)])
        assert seconds(model, 0.01, 1000) == pytest.approx(1e-3)


def test_a_change_that_stays_is_followed() -> None:
    model = ComputeModel([sample(0.01, 1000, 1e-3)] * 2 + [sample(0.01, 1000, 5e-3)] * 3)
    assert seconds(model, 0.01, 1000) == pytest.approx(5e-3)

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradpilot.policies.front import knee, non_dominated, weighted


def brute(objectives: np.ndarray) -> list[int]:
    front: list[int] = []
    for i, row in enumerate(objectives):
        if not np.isfinite(row).all():
            continue
        beaten = any(
            np.isfinite(other).all() and (other <= row).all() and (other < row).any()
            for other in objectives
        )
        if not beaten and not any((objectives[k] == row).all() for k in front):
            front.append(i)
    return front


coarse = st.sampled_from([0.0, 1.0, 2.0, 3.0, -1.5, 1e300, 1e-300, math.nan, math.inf])


@hypothesis_settings(max_examples=300, deadline=None)
@given(
    st.tuples(st.integers(1, 25), st.integers(1, 4)).flatmap(
        lambda shape: arrays(float, shape, elements=coarse | st.floats())
    )
)
def test_equals_brute_force(objectives: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        assert non_dominated(objectives).tolist() == brute(objectives)


def test_large_front_equals_brute_force() -> None:
    objectives = np.random.default_rng(0).random((400, 3)).round(2)
    assert non_dominated(objectives).tolist() == brute(objectives)


def test_nan_rows_never_win() -> None:
    objectives = np.array([[math.nan, 0, 0], [1, 1, 1], [0, -math.inf, 0]])
    assert non_dominated(objectives).tolist() == [1]
    assert knee(objectives) == 1
    assert weighted(objectives, (1, 1, 1)) == 1
    assert non_dominated(objectives[:1]).tolist() == []
    assert knee(objectives[:1]) is None
    assert weighted(objectives[:1], (1, 1, 1)) is None
    assert knee(np.zeros((0, 3))) is None


def test_flat_objectives_are_dropped() -> None:
    # pymoo's pseudo-weights return row 0 here.
    objectives = np.array([[1, 0.9], [1, 0.1], [1, 0.5]])
    assert weighted(objectives, (0.5, 0.5)) == 1
    assert knee(objectives) == 1
    assert knee(np.ones((4, 3))) == weighted(np.ones((4, 3)), (1, 1, 1)) == 0


def test_one_point_front() -> None:
    point = np.array([[1.0, 2.0, 3.0]])
    assert non_dominated(point).tolist() == [0]
    assert knee(point) == weighted(point, (0.4, 0.2, 0.4)) == 0


def test_knee_of_a_bent_front() -> None:
    x = np.linspace(0.05, 1, 200)
    front = np.stack([x, 0.05 / x], axis=1)
    at = knee(front)
    assert at is not None
    assert front[at, 0] == pytest.approx(math.sqrt(0.05), abs=0.01)


def test_weights_move_the_choice() -> None:
    x = np.linspace(0, 1, 101)
    front = np.stack([x, 1 - x], axis=1)
    light, heavy = weighted(front, (0.9, 0.1)), weighted(front, (0.1, 0.9))
    assert light is not None
    assert heavy is not None
    assert front[light, 0] == pytest.approx(0.1, abs=0.011)
    assert front[heavy, 0] == pytest.approx(0.9, abs=0.011)
    assert weighted(front, (0, 0)) == weighted(front, (1, 1)) == 50
    assert weighted(front, (math.nan, 1)) == 100

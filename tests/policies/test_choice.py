from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from gradpilot.policies.choice import allowed, choose, improvement, safest
from gradpilot.policies.evaluation import Evaluation
from tests.policies import scenario


def evaluation(
    step: list[float],
    worth: list[float],
    sync: list[float] | None = None,
    safe: tuple[int, ...] = (0,),
    gain: list[float] | None = None,
) -> Evaluation:
    n = len(step)
    return Evaluation(
        rows=np.arange(n, dtype=np.intp)[:, None],
        statistical_loss=1 - np.array(worth),
        compression_seconds=np.zeros(n),
        synchronisation_seconds=np.array(sync if sync is not None else step, dtype=float),
        step_seconds=np.array(step, dtype=float),
        gain=np.array(gain if gain is not None else worth, dtype=float),
        credit=np.array(gain if gain is not None else worth, dtype=float),
        efficiency=np.array(worth, dtype=float),
        wire_ratio=np.ones(n),
        safe=np.isin(np.arange(n), safe),
    )


def picked(made: Evaluation, **fields: object) -> int | None:
    choice = choose(made, scenario.settings(**fields))
    return None if choice is None else choice.index


def test_least_time_to_accuracy() -> None:
    assert picked(evaluation([10, 6, 3], [1, 0.9, 0.4])) == 1


def test_compression_must_pay() -> None:
    made = evaluation([10, 9.0], [1, 0.93])
    choice = choose(made, scenario.settings(min_improvement=0.05))
    assert choice is not None
    assert (choice.index, choice.pays) == (0, False)
    assert picked(made, min_improvement=0.01) == 1


def test_gain_floor_spares_safe_options() -> None:
    made = evaluation([10, 1], [1, 0.9], gain=[0.0, 0.01])
    assert picked(made, gain_floor=0.02) == 0
    assert picked(made, gain_floor=0.001) == 1


def test_nan_is_never_taken() -> None:
    made = evaluation([10, math.nan, 5], [1, 1, math.nan])
    assert picked(made) == 0
    for choice in ("tta", "knee", "weighted"):
        assert picked(evaluation([math.nan], [math.nan]), choice=choice) is None
        assert picked(made, choice=choice) == 0


def test_ties_go_to_the_efficient_then_the_lazy() -> None:
    assert picked(evaluation([10, 5, 10], [1, 0.5, 1], sync=[9, 1, 2], safe=(0, 1, 2))) == 2


def test_without_safe_options() -> None:
    assert picked(evaluation([10, 5], [1, 0.9], safe=())) == 1


@pytest.mark.parametrize("choice", ["knee", "weighted"])
def test_flat_objectives_and_single_points(choice: str) -> None:
    assert picked(evaluation([3], [1]), choice=choice) == 0
    # Efficiency and compression are flat over the front: one point is left.
    assert picked(evaluation([3, 2, 1], [1, 1, 1]), choice=choice) == 2


def test_knee_and_weights_look_at_the_front_only() -> None:
    worth = [1.0, 0.9, 0.1, 0.05]
    made = evaluation([10, 2, 1.9, 20], worth)
    low = {"gain_floor": 0.02}
    assert picked(made, choice="knee", **low) == 1
    assert picked(made, choice="weighted", weights=(1.0, 0.0, 0.0), **low) == 0
    assert picked(made, choice="weighted", weights=(0.0, 0.0, 1.0), **low) == 2


def test_improvement() -> None:
    made = evaluation([10, 6], [1, 0.9])
    old = evaluation([10], [1])
    for name, low, high in (("tta", 1 / 3, 1 / 3), ("knee", 0.0, 1.0), ("weighted", -1.0, 1.0)):
        settings = scenario.settings(choice=name)
        choice = choose(made, settings)
        assert choice is not None
        saved = improvement(made, choice, old, settings)
        assert low - 1e-9 <= saved <= high + 1e-9
    settings = scenario.settings(choice="knee")
    choice = choose(made, settings)
    assert choice is not None
    assert math.isnan(improvement(made, choice, evaluation([math.nan], [1]), settings))


def test_what_is_black_listed_is_not_taken() -> None:
    made = evaluation([10, 6, 3], [1, 0.9, 0.8])
    settings = scenario.settings()
    for banned, index in (([False] * 3, 2), ([False, False, True], 1), ([False, True, True], 0)):
        choice = choose(made, settings, np.array(banned))
        assert choice is not None
        assert choice.index == index
        assert index in allowed(made, settings, np.array(banned)).nonzero()[0]
    assert choose(made, settings, np.array([True] * 3)) is None
    mixed = dataclasses.replace(made, rows=np.array([[0, 0], [1, 1], [0, 2]]))
    assert allowed(mixed, settings, np.array([False, False, True])).tolist() == [True, True, False]


def test_the_safest_is_the_cheapest_that_sends_everything() -> None:
    made = evaluation([10, 9, 3], [1, 1, 0.9], safe=(0, 1))
    settings = scenario.settings()
    assert safest(made, settings) == 1
    assert safest(made, settings, np.array([False, True, False])) == 0
    assert safest(made, settings, np.array([True, True, False])) is None

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gradpilot.policies.allocation import Floats, Indices, allocate

TABLE = arrays(np.float64, (3, 4), elements=st.floats(0, 100))


def totals(costs: Floats, loads: Floats, row: Indices | list[int]) -> tuple[float, float]:
    at = np.arange(len(costs)), np.array(row, dtype=np.intp)
    return float(costs[at].sum()), float(loads[at].sum())


def brute_force(costs: Floats, loads: Floats, budget: float) -> float | None:
    fits = []
    for row in itertools.product(range(costs.shape[1]), repeat=len(costs)):
        cost, load = totals(costs, loads, list(row))
        if load <= budget:
            fits.append(cost)
    return min(fits, default=None)


@hypothesis_settings(max_examples=80, deadline=None)
@given(TABLE, TABLE, st.floats(0, 300))
def test_three_buckets_and_four_choices_as_by_brute_force(
    costs: Floats, loads: Floats, budget: float
) -> None:
    best = brute_force(costs, loads, budget)
    found = allocate(costs, loads, budget)
    if found is None:
        assert best is None or brute_force(costs, loads, budget * (1 - 1e-9)) is None
        return
    row, exact = found
    cost, load = totals(costs, loads, row)
    assert exact
    assert load <= budget * (1 + 1e-9)
    assert best is None or cost <= best * (1 + 1e-9)


@hypothesis_settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(2, 12), st.integers(1, 60))
def test_never_worse_than_the_best_uniform_choice_and_within_budget(
    seed: int, buckets: int, choices: int, states: int
) -> None:
    random = np.random.default_rng(seed)
    costs, loads = random.exponential(size=(2, buckets, choices))
    budget = float(np.median(loads.sum(axis=0)))
    found = allocate(costs, loads, budget, states)
    assert found is not None
    cost, load = totals(costs, loads, found.columns)
    assert load <= budget * (1 + 1e-9)
    fits = loads.sum(axis=0) <= budget
    assert cost <= costs.sum(axis=0)[fits].min() * (1 + 1e-12)


def many_buckets() -> tuple[Floats, Floats, float]:
    """Sixty buckets with error curves of different steepness, as energies of gradients are."""
    random = np.random.default_rng(1)
    ratios = np.geomspace(1e-3, 1e-1, 24)
    sizes = random.uniform(1e5, 1e7, size=(60, 1))
    loads = sizes * (1 - ratios ** random.uniform(0.1, 0.6, size=(60, 1)))
    return sizes * ratios, loads, float(loads[:, 12].sum())


def test_many_buckets_are_solved_to_a_thousandth() -> None:
    costs, loads, budget = many_buckets()
    found = allocate(costs, loads, budget)
    assert found is not None
    cost, load = totals(costs, loads, found.columns)
    assert load <= budget * (1 + 1e-9)
    # At any price of load, what the cheapest columns cost less the price of the budget is a bound.
    bounds = [
        (costs + price * loads).min(axis=1).sum() - price * budget
        for price in np.geomspace(1e-4, 10, 4000)
    ]
    assert cost < 1.001 * max(bounds)
    assert cost < 0.98 * costs[:, 12].sum()


def test_bins_keep_the_budget_and_cost_little() -> None:
    costs, loads, budget = many_buckets()
    fine = allocate(costs, loads, budget)
    coarse = allocate(costs, loads, budget, states=20)
    assert fine is not None
    assert coarse is not None
    assert not coarse.exact
    cost, load = totals(costs, loads, coarse.columns)
    assert load <= budget * (1 + 1e-9)
    assert cost < 1.02 * totals(costs, loads, fine.columns)[0]


def test_more_budget_never_costs_more() -> None:
    random = np.random.default_rng(5)
    costs, loads = random.exponential(size=(2, 6, 5))
    found = [allocate(costs, loads, budget) for budget in np.linspace(0.5, 12, 30)]
    spent = [totals(costs, loads, one.columns)[0] for one in found if one is not None]
    assert len(spent) > 10
    assert spent == sorted(spent, reverse=True)


def test_impossible() -> None:
    one = np.ones((2, 2))
    assert allocate(one, one, 1.9) is None
    assert allocate(np.ones((0, 2)), np.ones((0, 2)), 1.0) is None
    assert allocate(one, one, float("nan")) is None
    gap = np.array([[1.0, np.nan], [1.0, 1.0]])
    assert allocate(np.array([[np.nan, np.nan], [1.0, 1.0]]), one, 9.0) is None
    found = allocate(gap, one, 2.0)
    assert found is not None
    assert found.columns[0] == 0

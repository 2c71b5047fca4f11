from __future__ import annotations

import itertools

import numpy as np
import pytest

from gradpilot.policies import solver
from gradpilot.policies.choice import allowed, choose
from gradpilot.policies.cost import SPARSE
from gradpilot.policies.evaluation import Evaluation
from gradpilot.policies.front import knee, non_dominated, weighted
from gradpilot.policies.nsga import nsga2
from gradpilot.policies.problem import Space
from gradpilot.protos.messages import LinkEstimate
from tests.policies import scenario
from tests.policies.test_cost import PARAMETERS

LINK = LinkEstimate(1e-3, 8e-8)
MIXED = (1_000_000, 40_000, 1_000_000, 300)


def mixed_space(ratios: int = 12, **fields: object) -> Space:
    settings = scenario.settings(ratios=ratios, per_bucket=True, solver_seconds=60.0)
    return Space(scenario.inputs(sizes=MIXED, settings=settings, **fields), LINK)  # type: ignore[arg-type]


def search(space: Space) -> tuple[Evaluation, str]:
    return solver.per_bucket(
        space, space.uniform(), space.groups(), lambda e: allowed(e, space.inputs.settings)
    )


def test_same_seed_same_points() -> None:
    first, second = search(mixed_space())[0], search(mixed_space())[0]
    assert (first.rows == second.rows).all()


def test_global_random_state_is_left_alone() -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    search(mixed_space())
    assert (before == np.random.get_state()[1]).all()  # type: ignore[index]


def test_never_worse_than_the_best_uniform() -> None:
    space = mixed_space()
    uniform = space.uniform()
    found, how = search(space)
    assert "NSGA-II" in how
    settings = space.inputs.settings
    best, alone = choose(found, settings), choose(uniform, settings)
    assert best is not None
    assert alone is not None
    assert found.cost[best.index] <= uniform.cost[alone.index] * (1 + 1e-9)


@pytest.mark.parametrize("mbit", [10, 100, 1000])
def test_no_single_group_can_be_improved(mbit: float) -> None:
    space = mixed_space(mbit=mbit)
    found, _ = search(space)
    settings, groups = space.inputs.settings, space.groups()
    fit = np.flatnonzero(allowed(found, settings))
    best = fit[int(found.cost[fit].argmin())]
    for group in range(int(groups.max()) + 1):
        rows = np.repeat(found.rows[best][None], len(space), axis=0)
        rows[:, groups == group] = np.arange(len(space))[:, None]
        tried = space.evaluate(rows)
        ok = allowed(tried, settings)
        assert tried.cost[ok].min() >= found.cost[best] * (1 - 1e-9)


def test_mixing_pays_where_buckets_differ() -> None:
    space = mixed_space(mbit=100)
    uniform, (found, _) = space.uniform(), search(space)
    ok = allowed(found, space.inputs.settings)
    assert found.cost[ok].min() < uniform.cost[allowed(uniform, space.inputs.settings)].min()


def test_search_beats_drawing_at_random() -> None:
    """As many distinct points, no seeds: more of the true front is found, for every seed."""
    settings = scenario.settings(ratios=90)
    space = Space(scenario.inputs(settings=settings), LINK)
    exact = space.uniform()
    true = set(non_dominated(exact.objectives).tolist())
    for seed in range(3):
        found = solver.nsga2_uniform(space, seed, generations=10).rows[:, 0].tolist()
        assert len(set(found)) == len(found)
        drawn = np.random.default_rng(seed).choice(len(space), len(found), replace=False)
        assert len(true & set(found)) > 1.2 * len(true & set(drawn.tolist()))


def test_polish_stops_by_the_clock() -> None:
    space = mixed_space()
    numbers = np.arange(len(space), dtype=np.intp)
    start = np.full(len(MIXED), int(numbers[-1]), dtype=np.intp)
    ticks = itertools.count()
    _, late = solver.polish(
        space, space.groups(), start, numbers, lambda e: e.valid,
        seconds=0.5, clock=lambda: float(next(ticks)),
    )  # fmt: skip
    assert late


def test_small_products_are_enumerated() -> None:
    settings = scenario.settings(ratios=2, per_bucket=True)
    space = Space(scenario.inputs(ranks=2, sizes=(1_000_000, 300), settings=settings), LINK)
    found, how = search(space)
    assert how == f"all {len(space) ** 2} combinations"
    rows = set(map(tuple, found.rows.tolist()))
    assert rows == set(itertools.product(range(len(space)), repeat=2))


def test_close_to_the_exact_answer() -> None:
    settings = scenario.settings(ratios=5, per_bucket=True, solver_seconds=60.0)
    inputs = scenario.inputs(ranks=4, sizes=(1_000_000, 2_000), settings=settings)
    space = Space(inputs, LINK)
    exact, how = search(space)
    assert how.startswith("all")
    groups = space.groups()
    found, _ = solver.search_groups(space, groups, 3, None)
    exact_choice, found_choice = choose(exact, settings), choose(found, settings)
    assert exact_choice is not None
    assert found_choice is not None
    assert found.cost[found_choice.index] <= 1.05 * exact.cost[exact_choice.index]


def test_uniform_search_finds_most_of_the_front() -> None:
    space = Space(scenario.inputs(), LINK)
    exact = space.uniform()

    def front(evaluation: Evaluation) -> set[tuple[float, ...]]:
        # Sums of as many candidates as there happen to be may differ in their last bits.
        points = evaluation.objectives[non_dominated(evaluation.objectives)]
        return {tuple(row) for row in points.round(10)}

    found = front(solver.nsga2_uniform(space, 1))
    assert len(front(exact) & found) >= 0.8 * len(front(exact))


def test_tiny_space_ends() -> None:
    seen = nsga2(lambda x: np.stack([x[:, 0], -x[:, 0]], 1).astype(np.float64), np.array([2]), 0)
    assert sorted(seen.points[:, 0].tolist()) == [0, 1, 2]


def test_clock_stops_between_generations() -> None:
    ticks = itertools.count()
    seen = nsga2(
        lambda x: np.stack([x[:, 0], -x[:, 1]], 1).astype(np.float64),
        np.array([1000, 1000]),
        0,
        seconds=3.5,
        clock=lambda: float(next(ticks)),
    )
    assert seen.stopped
    assert seen.generations == 4


def test_forbidden_candidates_are_not_preferred() -> None:
    settings = scenario.settings(gain_floor=0.5, per_bucket=True, solver_seconds=60.0)
    space = Space(scenario.inputs(sizes=MIXED, settings=settings, mbit=50), LINK)
    found, _ = search(space)
    choice = choose(found, settings)
    assert choice is not None
    assert found.gain[choice.index] >= 0.5


RATIOS = (0.1, 0.033, 0.011, 0.004, 0.001)
GAINS = (0.95, 0.85, 0.7, 0.55, 0.35)


@pytest.mark.parametrize("network", [(1e-3, 1.0), (1e-3, 10.0), (4e-3, 20.0), (50e-3, 1.0)])
def test_one_dimensional_problem_of_the_paper(network: tuple[float, float]) -> None:
    """One variable, the ratio; objectives: exact time of the cheapest collective, 1 / gain."""
    grid = np.geomspace(0.001, 0.1, 4001)
    alpha, beta = network[0], 8e-9 / network[1]
    sizes = 4 * PARAMETERS["ResNet50"] * grid
    seconds = np.min([[f(8).seconds(alpha, beta, s) for s in sizes] for f in SPARSE.values()], 0)
    gain = np.exp(np.interp(np.log(grid), np.log(RATIOS[::-1]), np.log(GAINS[::-1])))
    objectives = np.stack([seconds, 1 / gain], axis=1)
    seen = nsga2(lambda x: objectives[x[:, 0]], np.array([4000]), 1, generations=40)
    found = seen.points[:, 0]
    for pick in (knee, lambda rows: weighted(rows, (0.6, 0.4))):
        exact, ours = pick(objectives), pick(objectives[found])
        assert exact is not None
        assert ours is not None
        assert grid[found[ours]] == pytest.approx(grid[exact], rel=0.1)

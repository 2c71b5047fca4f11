"""pymoo's NSGA-II on integers: vectorised, seeded, capped. pymoo is imported on first use only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

POPULATION = 40
GENERATIONS = 30


@dataclass(frozen=True, slots=True)
class Search:
    """What a search saw.

    Attributes:
        points: Every point evaluated, (P, variables), without repeats, in order.
        generations: Generations done.
        stopped: Whether the clock ended it before the last generation.
    """

    points: Indices
    generations: int
    stopped: bool


def nsga2(
    evaluate: Callable[[Indices], Floats],
    upper: Indices,
    seed: int,
    *,
    canonical: Callable[[Indices], Indices] = lambda points: points,
    initial: Indices | None = None,
    population: int = POPULATION,
    generations: int = GENERATIONS,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Minimise vector objectives over the integers 0 .. ``upper``, both ends included.

    The same arguments give the same points unless the clock stops the search.

    Args:
        evaluate: Maps (P, variables) to finite objectives (P, M).
        upper: Largest value per variable.
        seed: Seed of everything random.
        canonical: Maps points to the one of their equals that stands for all, so that repeats are
            seen; applied after rounding.
        initial: Points to start from; the rest of the first population is drawn.
        population: Points per generation.
        generations: Most generations.
        seconds: Wall-clock cap, looked at between generations.
        clock: Source of seconds.
    """
    started = clock()
    seed = seed & 0x7FFFFFFF
    start = _start(upper, seed, initial, population, canonical)
    algorithm = _algorithm(start, population, canonical)
    points: list[Indices] = []
    done, stopped = 0, False
    while done < generations:
        if done and clock() - started > seconds:
            stopped = True
            break
        if done == 0:
            problem = _problem(upper, evaluate)
            algorithm.setup(problem, seed=seed, termination=("n_gen", generations + 1))
        asked = algorithm.ask()
        if asked is None or len(asked) == 0:
            break  # every point of a tiny space was tried
        where = np.asarray(asked.get("X")).astype(np.intp)
        values = evaluate(where)
        asked.set("F", values)
        for one in asked:
            one.evaluated.update({"F", "G", "H"})
        algorithm.tell(infills=asked)
        points.append(where)
        done += 1
    return Search(_distinct(np.concatenate(points)), done, stopped)


def _start(
    upper: Indices,
    seed: int,
    initial: Indices | None,
    population: int,
    canonical: Callable[[Indices], Indices],
) -> Indices:
    drawn = np.random.default_rng(seed).integers(0, upper + 1, size=(population, len(upper)))
    if initial is not None and len(initial):
        drawn = np.concatenate([initial, drawn])
    return _distinct(canonical(drawn.astype(np.intp)))[:population]


def _distinct(points: Indices) -> Indices:
    """Drop repeated rows, keeping the order."""
    first = np.unique(points, axis=0, return_index=True)[1]
    return points[np.sort(first)]


def _algorithm(start: Indices, population: int, canonical: Callable[[Indices], Indices]) -> Any:
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.core.repair import Repair
    from pymoo.operators.crossover.sbx import SBX
    from pymoo.operators.mutation.pm import PM

    class Whole(Repair):  # type: ignore[misc]
        def _do(self, problem: Any, X: Floats, **_: Any) -> Indices:  # noqa: N803
            return canonical(np.around(X).astype(np.intp))

    # Own operator objects: pymoo's defaults are shared between all instances.
    return NSGA2(
        pop_size=population,
        sampling=start,
        crossover=SBX(prob=1.0, eta=3.0),
        mutation=PM(prob=0.9, eta=3.0),
        repair=Whole(),
        eliminate_duplicates=True,
    )


def _problem(upper: Indices, evaluate: Callable[[Indices], Floats]) -> Any:
    from pymoo.core.problem import Problem

    objectives = evaluate(np.zeros((1, len(upper)), dtype=np.intp)).shape[1]
    return Problem(
        n_var=len(upper), n_obj=objectives, xl=np.zeros(len(upper)), xu=upper.astype(float)
    )

"""Which trainings are done, in which order; what was done is kept and not done again.

Learning rates are matched: a method's search starts at the rate that suits dense training and goes
up or down by factors of 2, with one seed, for as long as held-out samples are foretold better. The
rate found is repeated with all seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.efficiency_runs.methods import BASELINE, METHODS, STRESSED, Method, named
from bench.efficiency_runs.tasks import Task
from bench.efficiency_runs.training import RANKS, Run, train

FARTHEST = 4
"""Factors of 2 that a search may go to either side."""

STRESS = (2.0, 4.0)
"""Learning rates of the stress runs, in units of dense training's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done.

    Attributes:
        steps: Steps of a training.
        seeds: Seeds; the first one searches learning rates.
        methods: Methods beside dense training.
        stressed: Names of methods that are also tried at too high rates.
        as_is: Seeds with which methods are also tried at dense training's own rate.
    """

    steps: int = 260
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    methods: tuple[Method, ...] = METHODS
    stressed: tuple[str, ...] = STRESSED
    as_is: int = 2


@dataclass(frozen=True, slots=True)
class Done:
    """A training that was done.

    Attributes:
        task: Name of the task.
        method: Name of the method.
        rate: Learning rate.
        seed: Seed.
        run: What came out.
    """

    task: str
    method: str
    rate: float
    seed: int
    run: Run


class Archive:
    """Trainings that were done, one a line in a file.

    Args:
        path: The file; None keeps nothing.
        steps: Steps of a training; a file of other ones is refused.

    Raises:
        ValueError: The file belongs to trainings of another kind.
    """

    def __init__(self, path: Path | None, steps: int) -> None:
        self._path = path
        self._known: dict[tuple[str, str, float, int], Done] = {}
        head = {"steps": steps, "ranks": RANKS}
        if path is None:
            return
        if path.exists():
            written = path.read_text(encoding="utf-8")
            # Without its end, the last line was interrupted.
            first, *lines = written[: written.rfind("\n") + 1].splitlines() or ["{}"]
            if json.loads(first) != head:
                raise ValueError(
                    f"{path} holds other trainings, {first}; remove it or name another"
                )
            if not written.endswith("\n"):
                path.write_text("\n".join((first, *lines, "")), encoding="utf-8")
            for line in lines:
                fields = json.loads(line)
                self._remember(Done(**{**fields, "run": Run(**fields["run"])}))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def _remember(self, done: Done) -> None:
        self._known[(done.task, done.method, done.rate, done.seed)] = done

    @property
    def all(self) -> list[Done]:
        """Return what was done, in order."""
        return list(self._known.values())

    def get(self, task: Task, method: Method, rate: float, seed: int, steps: int) -> Done:
        """Return a training, done now if it was not before."""
        known = self._known.get((task.name, method.name, rate, seed))
        if known is None:
            run = train(task, method.option, rate, seed, steps)
            known = Done(task.name, method.name, rate, seed, run)
            self._remember(known)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(known), allow_nan=False) + "\n")
        return known


def score(run: Run) -> float:
    """Return what a learning rate is judged by: mean loss of held-out samples on the way.

    The mean over the last three quarters, not the last value: a rate shall be fast and end well.
    """
    if run.diverged:
        return math.inf
    late = run.held_out[len(run.held_out) // 4 :]
    return sum(late) / len(late)


def search(evaluate: Callable[[float], float], start: float) -> float:
    """Return the best rate on a grid of factors of 2, found by going downhill from a start.

    Args:
        evaluate: Returns the score of a rate, lower is better, infinity where it diverges.
        start: Where to begin.
    """
    tried: dict[int, float] = {}

    def at(power: int) -> float:
        if power not in tried:
            tried[power] = evaluate(start * 2.0**power)
        return tried[power]

    # Compression asks for lower rates more often than for higher ones, so down comes first; from
    # where it diverges, down is better in any case.
    best = 0
    for way in (-1, 1):
        while abs(best + way) <= FARTHEST and (
            at(best + way) < at(best) or (way < 0 and math.isinf(at(best)))
        ):
            best += way
        if best:
            break
    return start * 2.0**best


def chosen(archive: Archive, task: Task, method: Method, plan: Plan, start: float) -> float:
    """Return the learning rate that suits a method; searched for with the first seed."""
    return search(
        lambda rate: score(archive.get(task, method, rate, plan.seeds[0], plan.steps).run), start
    )


def sweep(archive: Archive, tasks: list[Task], plan: Plan) -> Iterator[Done]:
    """Do all trainings that are missing, the most telling ones first; yield each.

    Args:
        archive: Where they are kept.
        tasks: What is learned.
        plan: How much is done.
    """
    rates: dict[tuple[str, str], float] = {}
    for method in (BASELINE, *plan.methods):
        for task in tasks:
            start = rates.get((task.name, BASELINE.name), task.rate)
            rates[task.name, method.name] = chosen(archive, task, method, plan, start)
            if method is BASELINE:
                for seed in plan.seeds:
                    yield archive.get(task, method, rates[task.name, method.name], seed, plan.steps)
    for seed in plan.seeds:
        for method in plan.methods:
            for task in tasks:
                rate = rates[task.name, method.name]
                yield archive.get(task, method, rate, seed, plan.steps)
    for times in STRESS:
        for name in (BASELINE.name, *plan.stressed):
            for task in tasks:
                for seed in plan.seeds[:2]:
                    rate = times * rates[task.name, BASELINE.name]
                    yield archive.get(task, named(name), rate, seed, plan.steps)
    for seed in plan.seeds[: plan.as_is]:
        for method in plan.methods:
            for task in tasks:
                rate = rates[task.name, BASELINE.name]
                yield archive.get(task, method, rate, seed, plan.steps)

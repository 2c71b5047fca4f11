"""Which quantity foretells that compression will make a training diverge, and from what value on.

Only trainings count whose learning rate dense training bears on the same task, with a step that is
still worth a third of one at the best rate: what diverges there diverges because of compression.
They are told from the trainings that a guard must leave alone, those whose steps are worth as much;
stopping what lies between is no loss.

Some quantities are known of an option before it is used, or from elsewhere; the others are watched
while it is used, and say how long before the loss shows the harm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.efficiency_runs.analysis import Threshold, threshold
from bench.efficiency_runs.methods import BASELINE
from bench.efficiency_runs.summary import Line, dense_of, progress
from bench.efficiency_runs.sweep import Done
from bench.efficiency_runs.training import EVERY

HARM = 1.1
"""A loss so many times that of the untrained model shows that something is wrong."""

USEFUL = 1 / 3
"""Efficiency from which on a training must not be stopped."""


@dataclass(frozen=True, slots=True)
class Case:
    """A training at a learning rate that dense training bears.

    Attributes:
        done: The training.
        efficiency: Progress of a step relative to a dense step.
        norms: Mean of ``||g_r||^2`` in dense training, the largest within every ``EVERY`` steps.
        line: The same method on the same task at the rate that suits it.
    """

    done: Done
    efficiency: float
    norms: tuple[float, ...]
    line: Line

    @property
    def diverged(self) -> bool:
        """Return whether it diverged."""
        return self.done.run.diverged

    @property
    def useful(self) -> bool:
        """Return whether a guard must leave it alone."""
        return not self.diverged and self.efficiency >= USEFUL

    @property
    def harm(self) -> int:
        """Return the first evaluation, from 0, at which the loss shows the harm, else the last."""
        run = self.done.run
        worse = [i for i, loss in enumerate(run.test) if not loss < HARM * run.start]
        return worse[0] if worse else max(len(run.test) - 1, 0)


Quantity = Callable[[Case], list[float]]
"""Returns the largest value within every ``EVERY`` steps."""


def residual(case: Case) -> list[float]:
    """Return ``sum ||r_r||^2 / sum ||g_r||^2``."""
    return case.done.run.residuals


def gradient(case: Case) -> list[float]:
    """Return ``||g_r||^2`` over that of dense training at the same time."""
    pairs = zip(case.done.run.norms, case.norms, strict=False)
    return [own / max(dense, 1e-30) for own, dense in pairs]


def of_option(statistic: str) -> Quantity:
    """Return a statistic of the method at the rate that suits it, the same at any time."""
    return lambda case: [case.line.statistic(statistic)]


QUANTITIES: Mapping[str, Quantity] = {
    "residual over gradient": residual,
    "gradient over dense gradient": gradient,
    "drag of the option": of_option("drag"),
    "noise 10 of the option": of_option("noise 10"),
}


def cases(done: Sequence[Done], matched: Iterable[Line], seed: int, steps: int) -> list[Case]:
    """Return the trainings that tell about divergence.

    Args:
        done: All trainings.
        matched: Methods on tasks at the rates that suit them.
        seed: Seed that rates were searched with.
        steps: Steps of a training.
    """
    dense = {task: dense_of(done, task, seed) for task in {d.task for d in done}}
    borne = {
        task: max(
            d.rate
            for d in done
            if d.task == task
            and d.method == BASELINE.name
            and progress(d.run, own, d.seed, steps)[0] >= USEFUL
        )
        for task, own in dense.items()
    }
    norms = {
        task: tuple(np.median([run.norms for run in own.runs.values()], axis=0).tolist())
        for task, own in dense.items()
    }
    of = {(line.task, line.method.name): line for line in matched}
    return [
        Case(
            one,
            progress(one.run, dense[one.task], one.seed, steps)[0],
            norms[one.task],
            of[one.task, one.method],
        )
        for one in done
        if one.method != BASELINE.name and one.rate <= borne[one.task]
    ]


def peak(case: Case, quantity: Quantity) -> float:
    """Return the largest value of a training."""
    return max(quantity(case), default=0.0)


def lead(case: Case, quantity: Quantity, at: float) -> float:
    """Return how many steps before the harm a threshold is passed, negative if after; else NaN."""
    passed = [i for i, value in enumerate(quantity(case)) if value > at]
    return float(EVERY * (case.harm - passed[0])) if passed else float("nan")


def safe_gain(of: Iterable[Case]) -> tuple[float, int]:
    """Return the largest gain of a method that diverged, and how many trainings have more."""
    gains = [(case.line.statistic("gain"), case.diverged) for case in of]
    largest = max((gain for gain, diverged in gains if diverged), default=0.0)
    return largest, sum(gain > largest for gain, _ in gains)


def told(of: Iterable[Case]) -> list[Case]:
    """Return the cases that a threshold must tell apart: what diverged, and what is useful."""
    return [case for case in of if case.diverged or case.useful]


def fit(of: Iterable[Case], quantity: Quantity, most_alarms: float = 1.0) -> Threshold:
    """Return the best threshold of a quantity between what diverged and what is useful.

    Args:
        of: Trainings.
        quantity: What is compared with the threshold.
        most_alarms: Largest share of useful trainings that may lie above it.

    Raises:
        ValueError: There are none of one kind.
    """
    known = told(of)
    values = [peak(case, quantity) for case in known]
    return threshold(values, [case.diverged for case in known], most_alarms)


def across(of: Iterable[Case], quantity: Quantity, most_alarms: float = 1.0) -> tuple[float, float]:
    """Return false alarms and misses on every task under the threshold of the other tasks.

    Shares of all useful and of all diverged trainings; NaN where a task has too few to fit to.
    """
    known = told(of)
    alarms, misses = [], []
    for task in {case.done.task for case in known}:
        own = [case for case in known if case.done.task == task]
        try:
            at = fit([c for c in known if c.done.task != task], quantity, most_alarms).at
        except ValueError:
            return float("nan"), float("nan")
        alarms += [peak(case, quantity) > at for case in own if case.useful]
        misses += [not peak(case, quantity) > at for case in own if case.diverged]
    return sum(alarms) / len(alarms), sum(misses) / len(misses)

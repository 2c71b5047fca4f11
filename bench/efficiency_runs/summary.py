"""From trainings to one line for every method and task."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.efficiency_runs.analysis import Floats, efficiency, smooth, targets
from bench.efficiency_runs.methods import BASELINE, Method, named
from bench.efficiency_runs.models import Points
from bench.efficiency_runs.sweep import Done, score
from bench.efficiency_runs.training import EVERY, RANKS, Run


@dataclass(frozen=True, slots=True)
class Dense:
    """Dense training of a task, to compare with.

    Attributes:
        rate: Learning rate that suits it.
        curve: Mean test loss over seeds, smoothed.
        runs: Its trainings by seed.
    """

    rate: float
    curve: Floats
    runs: dict[int, Run]

    @property
    def snr(self) -> float:
        """Return ``||mu||^2 / s^2`` of one rank's gradient, median over seeds."""
        return float(np.median([run.statistics["snr"] for run in self.runs.values()]))


@dataclass(frozen=True, slots=True)
class Line:
    """A method on a task at one learning rate.

    Attributes:
        task: Name of the task.
        method: The method.
        rate: Learning rate.
        rates: Learning rates that were tried.
        runs: Trainings at that rate by seed.
        efficiencies: Progress of a step relative to a dense step, by seed.
        reached: Share of targets that were reached, by seed.
        snr: ``||mu||^2 / s^2`` of one rank's gradient in dense training.
    """

    task: str
    method: Method
    rate: float
    rates: tuple[float, ...]
    runs: dict[int, Run]
    efficiencies: dict[int, float]
    reached: dict[int, float]
    snr: float

    @property
    def efficiency(self) -> float:
        """Return the median over seeds."""
        return float(np.median(list(self.efficiencies.values())))

    def statistic(self, name: str) -> float:
        """Return the median of a statistic over the seeds that have it; NaN without any.

        Gain is what policies mean by it: of random elements that were multiplied, their share.
        Beside the statistics of ``statistics.Watch`` there are some that a controller can foretell,
        from the gain and from what it measured of dense training (derived here):

        * ``delay``: ``d = 1 / gain - 1``. Where a share of ``1 - gain`` stays behind every step, d
          is both the residual ratio and the steps that a gradient waits. Where the rest is lost, d
          is the noise of what was heard: that of a mean of fewer ranks, or of fewer elements.
        * ``drag``: what is late, in units of the mean's sampling noise ``s^2 / N``. Of d gradients
          that wait the noise adds up to d, and the signal, which they have in common, to
          ``d^2 N ||mu||^2 / s^2``. Where ranks are left out, d; where elements are, those of the
          mean, ``d (1 + N ||mu||^2 / s^2)``. ``drag seen`` is the same from the residual ratio
          that was measured, where there is a residual.
        """
        if name in ("delay", "drag", "drag seen"):
            late = 1.0 / max(self.statistic("gain"), 1e-9) - 1.0
            if name == "drag seen" and self.method.feedback:
                late = self.statistic("residual")
            waiting = late if self.method.feedback else float(self.method.unbiased)
            return late if name == "delay" else late * (1.0 + waiting * RANKS * self.snr)
        if name == "gain" and self.method.unbiased:
            return self.method.option.ratio
        values = [r.statistics[name] for r in self.runs.values() if name in r.statistics]
        return float(np.median(values)) if values else float("nan")


def dense_of(done: Iterable[Done], task: str, seed: int) -> Dense:
    """Return dense training of a task at its best rate.

    Args:
        done: All trainings.
        task: Name of the task.
        seed: Seed that rates were searched with.
    """
    own = [d for d in done if d.task == task and d.method == BASELINE.name]
    rate = repeated(own, seed)
    runs = {d.seed: d.run for d in own if d.rate == rate}
    curve = smooth(np.mean([run.test for run in runs.values()], axis=0))
    return Dense(rate, curve, runs)


def progress(run: Run, dense: Dense, seed: int, steps: int) -> tuple[float, float]:
    """Return ``analysis.efficiency`` of a training against dense training with the same seed."""
    curve = smooth([] if run.diverged else run.test)
    paired = dense.runs.get(seed)
    against = dense.curve if paired is None else smooth(paired.test)
    return efficiency(against, curve, targets(dense.curve), EVERY, run.start, steps)


def lines(done: Sequence[Done], seed: int, steps: int, matched: bool = True) -> list[Line]:
    """Return a line for every method and task but dense training's own.

    Args:
        done: All trainings.
        seed: Seed that rates were searched with.
        steps: Steps of a training.
        matched: Whether at the learning rate that suits the method, or dense training's.
    """
    grouped: dict[tuple[str, str], list[Done]] = defaultdict(list)
    for one in done:
        grouped[one.task, one.method].append(one)
    baselines = {task: dense_of(done, task, seed) for task in sorted({d.task for d in done})}
    found = []
    for (task, name), own in grouped.items():
        if name == BASELINE.name:
            continue
        dense = baselines[task]
        rate = repeated(own, seed) if matched else dense.rate
        at_rate = {d.seed: d.run for d in own if d.rate == rate}
        measured = {s: progress(run, dense, s, steps) for s, run in sorted(at_rate.items())}
        if measured:
            found.append(
                Line(
                    task=task,
                    method=named(name),
                    rate=rate,
                    rates=tuple(sorted({d.rate for d in own if d.seed == seed})),
                    runs={s: at_rate[s] for s in measured},
                    efficiencies={s: m[0] for s, m in measured.items()},
                    reached={s: m[1] for s, m in measured.items()},
                    snr=dense.snr,
                )
            )
    return found


def repeated(own: Sequence[Done], seed: int) -> float:
    """Return the learning rate that a search chose: it was repeated most.

    Other rates may have been tried to see divergence, or because they are dense training's.

    Args:
        own: Trainings of one method on one task.
        seed: Seed that rates were searched with.
    """
    count = Counter(d.rate for d in own)
    searched = [d for d in own if d.seed == seed]
    return min(searched, key=lambda d: (-count[d.rate], score(d.run))).rate


def points(of: Sequence[Line], statistics: Sequence[str]) -> Points:
    """Return lines as points for models; lines that lack a statistic are left out."""
    usable = [line for line in of if np.isfinite([line.statistic(s) for s in statistics]).all()]
    return Points(
        tuple(line.task for line in usable),
        tuple(line.method.family for line in usable),
        {s: np.array([line.statistic(s) for line in usable]) for s in statistics},
        np.array([line.efficiency for line in usable]),
    )

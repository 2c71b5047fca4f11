"""What skipping costs in accuracy, with the learning rate matched to every variant.

A search starts at one rate for all and goes up or down by factors of 2 for as long as held-out
samples are classified better, mean over all seeds. The rate of plain all-reduce is trained with,
too, to show what comes of the rate alone. Test samples play no part in the search.

Letters: N ranks, S skipped steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench import results_file
from bench.claims.training import Job
from bench.skip.training import Trained, train
from gradpilot.policies.signal import shrink_factor
from gradpilot.protos.messages import DENSE, Option

RANKS = 8
FARTHEST = 3
"""Factors of 2 that a search may go to either side."""

MOST_LOSS = 2.0
"""Points that a quarter skipped at random may cost where ranks hold one class each (T9)."""

BY_CHANCE = 0.5
"""Points by which two means over three seeds may differ by chance."""

ALL_CLASSES, ONE_CLASS = "all classes on every rank", "one class a rank"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to average gradients.

    Attributes:
        skip: Steps S left out; 0 for plain all-reduce.
        rotation: ``random`` or ``static``.
        selective: Whether the most important bucket skips nothing.
        divisor: See ``Option.divisor``.
        feedback: Whether what was left out waits in a residual.
    """

    skip: int
    rotation: str = "random"
    selective: bool = False
    divisor: str = "skip"
    feedback: bool = False

    def option(self, snr: float) -> Option:
        """Return the option of a bucket.

        Args:
            snr: Signal-to-noise ratio of plain all-reduce, for divisor ``shrink``.
        """
        if not self.skip:
            return DENSE
        shrink = shrink_factor(snr, RANKS - self.skip) if self.divisor == "shrink" else 1.0
        return Option(
            collective="ring",
            skip=self.skip,
            rotation=self.rotation,
            divisor=self.divisor,
            shrink=shrink,
            skip_feedback=self.feedback,
        )

    @property
    def choice(self) -> str:
        """Return which of the published variants it is: ``static``, ``random``, ``selective``."""
        return "selective" if self.selective else self.rotation


@dataclass(frozen=True, slots=True)
class Setup:
    """How much is trained.

    Attributes:
        steps: Steps of a training.
        seeds: Seeds.
        all_classes: Variants tried where every rank has all classes.
        one_class: Variants tried where every rank has one class.
        rate: Where searches start.
    """

    steps: int
    seeds: tuple[int, ...]
    all_classes: tuple[Variant, ...]
    one_class: tuple[Variant, ...]
    rate: float = 0.05


def _choices(skip: int) -> tuple[Variant, ...]:
    return tuple(
        Variant(skip, rotation, selective, feedback=feedback)
        for rotation, selective in (("static", False), ("random", False), ("random", True))
        for feedback in (False, True)
    )


def _divisors(skip: int) -> tuple[Variant, ...]:
    ways = (("skip", False), ("drop", False), ("shrink", False), ("skip", True))
    return tuple(Variant(skip, divisor=divisor, feedback=feedback) for divisor, feedback in ways)


def _once(*variants: Variant) -> tuple[Variant, ...]:
    return tuple(dict.fromkeys(variants))


FULL = Setup(
    steps=120,
    seeds=(0, 1, 2),
    all_classes=_once(*(v for s in (1, 2, 4, 6, 7) for v in _divisors(s)), *_choices(4)),
    one_class=_once(*_choices(2), *_choices(4)),
)

QUICK = Setup(
    steps=40,
    seeds=(0,),
    all_classes=_divisors(4),
    one_class=(Variant(2, "static"), Variant(2), Variant(2, selective=True)),
)


def measure(setup: Setup, say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Train everything and return a row for every variant and kind of data."""
    found = []
    for data, variants in ((ALL_CLASSES, setup.all_classes), (ONE_CLASS, setup.one_class)):
        job = Job(
            RANKS, setup.steps, batch=16, rate=setup.rate, momentum=0.9, hidden=32,
            one_class=data == ONE_CLASS,
        )  # fmt: skip
        dense = _Trainings(job, Variant(0), snr=-1.0)
        dense_rate = dense.search(setup)
        snr = dense.at(dense_rate, setup.seeds[0]).snr
        plain = dense.accuracy(dense_rate, setup.seeds)
        for variant in (Variant(0), *variants):
            trainings = dense if not variant.skip else _Trainings(job, variant, snr)
            rate = trainings.search(setup)
            ours = [100 * trainings.at(rate, seed).accuracy for seed in setup.seeds]
            same = trainings.accuracy(dense_rate, setup.seeds)
            found.append(
                {
                    "case": "accuracy",
                    "data": data,
                    "ranks": RANKS,
                    "skip": variant.skip,
                    "choice": variant.choice if variant.skip else "",
                    "divisor": variant.divisor if variant.skip else "",
                    "shrink": variant.option(snr).shrink,
                    "feedback": variant.feedback,
                    "steps": setup.steps,
                    "seeds": len(setup.seeds),
                    "spared_percent": round(100 * trainings.at(rate, setup.seeds[0]).spared, 2),
                    "rate": rate,
                    "accuracy_percent": round(sum(ours) / len(ours), 3),
                    "accuracy_least": round(min(ours), 3),
                    "accuracy_most": round(max(ours), 3),
                    "less_than_dense_points": round(plain - sum(ours) / len(ours), 3),
                    "dense_rate": dense_rate,
                    "less_at_dense_rate_points": round(plain - same, 3),
                    "dense_snr": round(snr, 4),
                    "trainings": trainings.count,
                }
            )
        say(f"{data}: done")
    return found


class _Trainings:
    """The trainings of one variant, each done once."""

    def __init__(self, job: Job, variant: Variant, snr: float) -> None:
        self._job, self._variant = job, variant
        self._option = variant.option(snr)
        self._done: dict[tuple[float, int], Trained] = {}

    @property
    def count(self) -> int:
        return len(self._done)

    def at(self, rate: float, seed: int) -> Trained:
        key = (rate, seed)
        if key not in self._done:
            job, selective = replace(self._job, rate=rate), self._variant.selective
            self._done[key] = train(job, self._option, seed, selective=selective)
        return self._done[key]

    def accuracy(self, rate: float, seeds: Sequence[int]) -> float:
        """Return the mean accuracy over seeds, percent."""
        return 100 * sum(self.at(rate, seed).accuracy for seed in seeds) / len(seeds)

    def search(self, setup: Setup) -> float:
        """Return the rate at which held-out samples are classified best."""

        def held_out(rate: float) -> float:
            return sum(self.at(rate, seed).held_out for seed in setup.seeds)

        return climb(setup.rate, held_out)


def climb(start: float, score: Callable[[float], float]) -> float:
    """Return the best of ``start`` times powers of 2, going on for as long as it gets better."""
    best, top = start, score(start)
    for factor in (2.0, 0.5):
        for _ in range(FARTHEST):
            rate = best * factor
            found = score(rate)
            if not found > top:
                break
            best, top = rate, found
        if best != start:
            break  # the other side is downhill
    return best


def verdicts(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is claimed of rotation, divisor and feedback, as far as it was trained."""
    rows = {
        (r["data"], r["skip"], r["choice"], r["divisor"], r["feedback"]): r["accuracy_percent"]
        for r in found
    }
    quarter, half = RANKS // 4, RANKS // 2

    def of(data: str, skip: int, choice: str, divisor: str = "skip", kept: bool = False) -> Any:
        return rows.get((data, skip, choice, divisor, kept))

    claims = []

    def claim(name: str, target: str, value: float, holds: bool) -> None:
        claims.append(results_file.verdict(name, target, round(value, 2), holds))

    plain = rows.get((ONE_CLASS, 0, "", "", False))
    static, turned = (of(ONE_CLASS, quarter, choice) for choice in ("static", "random"))
    if None not in (plain, static, turned):
        where = f"{ONE_CLASS}, {quarter} of {RANKS} skipped, rates matched"
        gap = turned - static
        claim(f"{where}: random less static, points", ">= 0", gap, gap >= 0)
        gap = plain - turned
        claim(f"{where}: all-reduce less random, points", f"<= {MOST_LOSS:g}", gap,
              gap <= MOST_LOSS)  # fmt: skip
    # Of a static rotation there is nothing to try: what it leaves out is never sent.
    for skip in (quarter, half):
        without, kept = (of(ONE_CLASS, skip, "random", kept=k) for k in (False, True))
        if None not in (without, kept):
            gap = kept - without
            where = f"{ONE_CLASS}, {skip} of {RANKS} skipped, random, rates matched"
            claim(f"{where}: with error feedback less without, points", ">= 0", gap, gap >= 0)
    ways = [of(ALL_CLASSES, half, "random", divisor) for divisor in ("skip", "drop", "shrink")]
    if None not in ways:
        gap = max(ways) - min(ways)
        where = f"{ALL_CLASSES}, {half} of {RANKS} skipped, rates matched"
        claim(f"{where}: between best and worst divisor, points", f"<= {BY_CHANCE:g}", gap,
              gap <= BY_CHANCE)  # fmt: skip
    return claims

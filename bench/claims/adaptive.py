"""The claim about a ratio that follows the network, on the published schedule C2.

A small network is trained; every epoch, the decision that ``gradpilot.policies`` makes for the
link of that epoch and the live gradient sets the compressor and the ratio. Seconds on the wire are
computed for a model of ResNet18's size: training time plays no part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from bench.claims.accuracy import RATIOS, published, seeds, topk
from bench.claims.checks import Claim, Figure, Finding, at_least, at_most
from bench.claims.cost import PARAMETERS
from bench.claims.deciding import STAR_KEY, TOPK_KEY, estimate, job
from bench.claims.selection import artopk
from bench.claims.training import mean_accuracy, train
from gradpilot.policies.base import PolicySettings
from gradpilot.policies.choice import choose
from gradpilot.policies.problem import Space
from gradpilot.protos.messages import LinkEstimate, Option
from gradpilot.worker_agent.statistics import energy_curve

EPOCHS = 50
# Epochs, latency in ms, Gbit/s.
SCHEDULE = (
    (4, 1, 25), (4, 2, 20), (4, 4, 15), (4, 8, 10), (4, 16, 5), (8, 32, 1),
    (4, 16, 5), (4, 8, 10), (4, 4, 15), (4, 2, 20), (6, 1, 25),
)  # fmt: skip

FAMILIES = {STAR_KEY: ("native",), TOPK_KEY: ("allgather",)}


def links() -> list[LinkEstimate]:
    """Return the link of every epoch."""
    phases = ([estimate(ms, gigabits)] * epochs for epochs, ms, gigabits in SCHEDULE)
    return list(itertools.chain.from_iterable(phases))


class Chooser:
    """Decides at the first step of every epoch and counts the seconds on the wire.

    Args:
        steps: Steps in all.
        wanted: ``PolicySettings.choice``.
    """

    def __init__(self, steps: int, wanted: str) -> None:
        self._per_epoch = steps / EPOCHS
        self._settings = PolicySettings(choice=wanted)
        self._links = links()
        self._epoch = -1
        self._option = artopk("star", RATIOS[0])
        self._seconds = 0.0
        self.wire_seconds = 0.0
        self.used: list[Option] = []

    def __call__(self, step: int, corrected: Sequence[Tensor]) -> Option:
        """Return the option of a step."""
        epoch = int(step / self._per_epoch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._decide(corrected)
        self.wire_seconds += self._seconds
        return self._option

    def _decide(self, corrected: Sequence[Tensor]) -> None:
        curves = [curve for c in corrected if (curve := energy_curve(c))]
        inputs = job(
            [PARAMETERS["ResNet18"]],
            FAMILIES,
            energy=tuple(np.mean(curves, axis=0).tolist()) if curves else (),
            settings=self._settings,
        )
        space = Space(inputs, self._links[self._epoch])
        evaluation = space.uniform()
        found = choose(evaluation, self._settings)
        if found is not None:
            self._option = space.options(evaluation.rows[found.index])[0]
            self._seconds = float(evaluation.synchronisation_seconds[found.index])
        self.used.append(self._option)


def static_seconds(options: Sequence[Option], steps: int) -> float:
    """Return the seconds on the wire if every epoch takes the fastest of a few options."""
    inputs = job([PARAMETERS["ResNet18"]], FAMILIES)
    total = 0.0
    for speed in links():
        space = Space(inputs, speed)
        numbers = [[space.add(option)] for option in options]
        found = space.evaluate(np.array(numbers, dtype=np.intp))
        total += float(found.synchronisation_seconds.min()) * steps / EPOCHS
    return total


def _schedule(quick: bool) -> Iterator[Finding]:
    work, runs = published(quick), seeds(quick)
    ratios = RATIOS[:1] if quick else RATIOS
    static = {r: mean_accuracy(work, artopk("star", r), runs) for r in ratios}
    best = max(static, key=static.__getitem__)
    yield Figure("best static ratio of star", best)
    yield Figure("best static ratio of star: accuracy, %", static[best])
    budget = static_seconds([artopk("star", RATIOS[0])], work.steps)
    yield Figure("star at 10 % all the way: wire, s", budget)
    # How much of a saving is due to the collective alone.
    either = static_seconds([artopk("star", RATIOS[0]), topk(RATIOS[0])], work.steps)
    yield Figure("10 % all the way by the faster collective of each epoch: wire, s", either)
    for wanted in ("knee", "tta"):
        choosers = [Chooser(work.steps, wanted) for _ in runs]
        results = [train(work, c, seed) for c, seed in zip(choosers, runs, strict=True)]
        accuracy = 100 * sum(r.accuracy for r in results) / len(results)
        spent = sum(c.wire_seconds for c in choosers) / len(choosers)
        used = [option for c in choosers for option in c.used]
        yield Figure(f"{wanted}: accuracy, %", accuracy)
        yield Figure(f"{wanted}: least ratio used", min(o.ratio for o in used))
        yield Figure(f"{wanted}: greatest ratio used", max(o.ratio for o in used))
        gathered = sum(o.collective == "allgather" for o in used) / len(used)
        yield Figure(f"{wanted}: share of epochs by all-gather", gathered)
        gap = accuracy - static[best]
        yield at_least(f"{wanted}: accuracy less the best static ratio's, points", gap, -0.5)
        yield at_most(f"{wanted}: wire over that of star at 10 % all the way", spent / budget, 1.0)
        yield Figure(f"{wanted}: wire over that of 10 % by the faster collective", spent / either)


CLAIMS = (
    Claim("T16", "A ratio that follows the network is as accurate as the best fixed one, in less"
          " time on the wire", "paper", "measured", _schedule),
)  # fmt: skip

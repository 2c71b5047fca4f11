"""What could have been reached: by who knows the network, and by the best plan that never changes.

Both use the same model of efficiency as the policies, on the true gains, and obey the gain floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradpilot.protos.messages import Option
from gradpilot.simulate.driver import ROUNDING, Case, Driver, Result
from gradpilot.simulate.engine import BLOCK, Weather, part, step_seconds
from gradpilot.simulate.traces import Link
from gradpilot.simulate.world import Costs, safe

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SHORTLIST = 24
"""Options that are looked at step by step, the best ones without noise."""

TRIED = 3
"""Fixed plans that are carried out with noise, the best ones without."""

PHASES = 5
"""Points of a training at which an option must keep the gain floor."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How long the oracle takes: steps and seconds."""

    seconds: float
    steps: int


class Clairvoyant:
    """All options of a job, given to all buckets alike, and what they truly cost and are worth.

    Args:
        case: What is simulated.
        weather: The randomness that policies met.
        extra: Further options, such as those that policies chose off the grid.
    """

    def __init__(self, case: Case, weather: Weather, extra: Sequence[Option] = ()) -> None:
        self._case, self._weather = case, weather
        world = case.world
        self.options = tuple(dict.fromkeys((*world.options(case.settings), *extra)))
        self._costs = world.costs(self.options)
        self._safe = np.array([safe(option) for option in self.options])
        self._links: dict[Link, Floats] = {}

    def oracle(self) -> Bound:
        """Take the best allowed option in every single step; switching costs nothing."""
        case = self._case
        now = progress = 0.0
        step = 0
        while progress < case.steps:
            number, offset = divmod(step, BLOCK)
            link = case.trace.at(now)
            gain, worth = self._worth(progress / case.steps)
            rate = np.where(self._allowed(gain), worth / self._seconds(link), 0.0)
            best = np.argsort(-rate, kind="stable")[: min(SHORTLIST, len(rate))]
            best = best[rate[best] > 0]
            block = part(self._weather.block(number), offset, BLOCK)
            seconds = step_seconds(_some(self._costs, best), link, block)
            cost = seconds / worth[best, None]
            winner = cost.argmin(axis=0)
            column = np.arange(cost.shape[1])
            taken, gained = seconds[winner, column], worth[best][winner]
            begins = now + np.concatenate([[0.0], np.cumsum(taken)])
            upto = int(np.searchsorted(begins[:-1], case.trace.next_change(now) - 1e-9))
            upto = max(upto, 1)
            reached = progress + np.cumsum(gained[:upto])
            if reached[-1] >= case.steps:
                last = int(np.searchsorted(reached, case.steps - 1e-9))
                before = float(reached[last - 1]) if last else progress
                share = (case.steps - before) / gained[last]
                return Bound(float(begins[last] + share * taken[last]), step + last + 1)
            now, progress, step = float(begins[upto]), float(reached[-1]), step + upto
        raise AssertionError("unreachable")

    def best_fixed(self) -> tuple[tuple[Option, ...], Result]:
        """Return the option that is best if it is kept from the first step on, and its result."""
        totals = self._fixed_seconds()
        buckets = len(self._case.world.job.layout.buckets)
        found = []
        for k in np.argsort(totals, kind="stable")[:TRIED]:
            if math.isfinite(totals[k]):
                plan = (self.options[int(k)],) * buckets
                found.append((plan, Driver(self._case, self._weather).fixed(plan)))
        return min(found, key=lambda pair: pair[1].seconds)

    def loss(self, option: Option, link: Link, at: float) -> float:
        """Return the share of time per progress that the best option would save over one.

        Args:
            option: The one, of this object's options.
            link: The link.
            at: Share of the training that is done.
        """
        gain, worth = self._worth(at)
        cost = self._seconds(link) / worth
        own = float(cost[self.options.index(option)])
        return 1 - float(cost[self._allowed(gain)].min()) / own

    def _fixed_seconds(self) -> Floats:
        """Return how long every option takes without noise, infinite where it is not allowed."""
        case = self._case
        kept = np.ones(len(self.options), dtype=np.bool_)
        worths = []
        for at in np.linspace(0, 1, PHASES):
            gain, worth = self._worth(float(at))
            kept &= self._allowed(gain)
            worths.append(worth)
        # Harmonic: seconds per progress is what adds up while progress goes on evenly.
        worth = 1.0 / np.mean([1.0 / w for w in worths], axis=0)
        done, total = np.zeros(len(kept)), np.full(len(kept), np.inf)
        now = 0.0
        while not np.isfinite(total[kept]).all():
            rate = worth / self._seconds(case.trace.at(now))
            change = case.trace.next_change(now)
            ends = now + (case.steps - done) / rate
            over = (ends <= change) & ~np.isfinite(total)
            total[over] = ends[over]
            if not math.isfinite(change):
                break
            done += rate * (change - now)
            now = change
            if np.isfinite(total[kept]).sum() > TRIED and now > 2 * total[kept].min():
                break
        return np.where(kept, total, np.inf)

    def _worth(self, at: float) -> tuple[Floats, Floats]:
        """Return gain and efficiency over the whole gradient, (K,)."""
        weights = self._case.world.job.gradients.weights(at)
        gain, worth = self._case.world.worth(self.options, at)
        return gain @ weights, worth @ weights

    def _allowed(self, gain: Floats) -> Bools:
        floor = self._case.settings.gain_floor * (1 - ROUNDING)
        return np.asarray((gain >= floor) | self._safe)

    def _seconds(self, link: Link) -> Floats:
        if link not in self._links:
            self._links[link] = self._case.world.seconds(self._costs, link)
        return self._links[link]


def _some(costs: Costs, rows: NDArray[np.intp]) -> Costs:
    return Costs(
        costs.compress[rows],
        costs.decompress[rows],
        costs.alphas[rows],
        costs.pushed[rows],
        costs.native[rows],
        costs.at_once,
    )

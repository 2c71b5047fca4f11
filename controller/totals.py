"""Counts of a run that never go backwards: agents' counters, which start again, and decisions.

Beside them the errors of predicted step times.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from gradpilot.policies.history import StepError
from gradpilot.protos.messages import Counters

SUMMED = ("wire_bytes", "dense_bytes", "reports_dropped")
"""Counters that every rank adds to."""

SHARED = ("switches", "nonfinite_steps", "agreement_failures", "plans_rejected", "residual_resets")
"""Counters of events that all ranks see alike: the rank that saw most counts."""


class Totals:
    """Growth of agents' counters since the controller first heard of the run."""

    def __init__(self) -> None:
        self._last: dict[int, Counters | None] = {}
        self._growth: dict[int, dict[str, int]] = {}

    def start(self, rank: int, *, from_zero: bool) -> None:
        """A new agent speaks for the rank; its counters start at zero, or where it says first."""
        self._last[rank] = Counters() if from_zero else None

    def add(self, rank: int, counters: Counters) -> None:
        """Take the newest counters of a rank."""
        last = self._last.get(rank)
        self._last[rank] = counters
        if last is None:
            return
        growth = self._growth.setdefault(rank, dict.fromkeys((*SUMMED, *SHARED), 0))
        for name in growth:
            growth[name] += max(getattr(counters, name) - getattr(last, name), 0)

    def __getitem__(self, name: str) -> int:
        values = [growth[name] for growth in self._growth.values()]
        return sum(values) if name in SUMMED else max(values, default=0)


OUTCOMES = ("switch", "keep", "pinned", "probe", "error")
"""Values of ``Decision.outcome``."""

DECISION_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram of decision times, seconds."""


ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper bounds of the histogram of prediction errors, shares of the predicted step time."""

COMPRESSORS = 8
"""Compressors whose prediction errors are told apart; the least recently used goes first."""

RECENT_ERRORS = 16
"""Newest errors of each, of which the median is told."""


class Histogram:
    """Counts of values up to upper bounds, and their sum.

    Args:
        bounds: Upper bounds, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        """Count one value."""
        self.sum += value
        self._counts[bisect.bisect_left(self._bounds, value)] += 1

    def rows(self) -> list[tuple[str, float]]:
        """Return ``(upper bound, values at most that large)``, the last bound ``+Inf``."""
        bounds = [*map(str, self._bounds), "+Inf"]
        totals = itertools.accumulate(self._counts)
        return [(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)]


class DecisionStats:
    """How decisions of a run ended and how long they took."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.undone: Counter[str] = Counter()
        """Plans that a guard undid, by cause."""
        self.seconds = Histogram(DECISION_BUCKETS)

    def add(self, outcome: str, seconds: float) -> None:
        """Count one decision."""
        self.outcomes[outcome] += 1
        self.seconds.add(seconds)


class PredictionStats:
    """How far measured step times were from those that the decision before had predicted."""

    def __init__(self) -> None:
        self.errors = Histogram(ERROR_BUCKETS)
        self._recent: OrderedDict[str, deque[float]] = OrderedDict()

    def take(self, before: Sequence[StepError], after: Sequence[StepError]) -> None:
        """Take what a decision added to the errors of a run's history: the newest, if any."""
        if after and after[-1:] != before[-1:]:
            self.add(after[-1].compressor, after[-1].ratio)

    def add(self, compressor: str, ratio: float) -> None:
        """Take one look at a plan.

        Args:
            compressor: Its compressor.
            ratio: Measured step time / predicted.
        """
        error = abs(ratio - 1.0)
        self.errors.add(error)
        self._recent.setdefault(compressor, deque(maxlen=RECENT_ERRORS)).append(error)
        self._recent.move_to_end(compressor)
        if len(self._recent) > COMPRESSORS:
            self._recent.popitem(last=False)

    def by_compressor(self) -> dict[str, float]:
        """Return the median of the newest errors by compressor."""
        return {name: statistics.median(errors) for name, errors in self._recent.items()}

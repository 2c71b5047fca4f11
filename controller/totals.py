"""Counts of a run that never go backwards: agents' counters, which start again, and decisions."""

from __future__ import annotations

import bisect
from collections import Counter

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


class DecisionStats:
    """How decisions of a run ended and how long they took."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.undone: Counter[str] = Counter()
        """Plans that a guard undid, by cause."""
        self.seconds = 0.0
        self._counts = [0] * (len(DECISION_BUCKETS) + 1)

    def add(self, outcome: str, seconds: float) -> None:
        """Count one decision."""
        self.outcomes[outcome] += 1
        self.seconds += seconds
        self._counts[bisect.bisect_left(DECISION_BUCKETS, seconds)] += 1

    def histogram(self) -> list[tuple[str, float]]:
        """Return ``(upper bound, decisions at most that long)``, the last bound ``+Inf``."""
        rows, total = [], 0
        bounds = [*map(str, DECISION_BUCKETS), "+Inf"]
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows

"""Whether a probe of the link is under way, so that ranks are not asked for it twice.

Ranks run a probe at their next decision step and report its collectives with that step. Until then
every new window shows the same lack of evidence, and a policy would ask again each time.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradpilot.protos.messages import WireSample

WINDOWS = 5
"""Report times that a probe gets at least before it counts as lost."""

DECISION_STEPS = 3
"""The same in decision steps of the plan in force; the longer of the two counts."""


def patience(report_seconds: float, interval: int, step_seconds: float) -> float:
    """Return how many seconds a probe gets.

    Args:
        report_seconds: Time between two reports of a rank.
        interval: Steps between two decision steps.
        step_seconds: Step time; 0 if unknown.
    """
    return max(WINDOWS * report_seconds, DECISION_STEPS * interval * step_seconds)


class ProbeWatch:
    """The probe of one run. ``now`` is monotonic seconds."""

    def __init__(self) -> None:
        self.repeats = 0
        """Times that a policy wanted a probe while one was under way; only grows."""
        self.answered = False
        """Whether a probe was answered by all ranks and nothing was decided since."""
        self._id = 0
        self._after_step = 0
        self._deadline = 0.0
        self._missing: set[int] = set()

    def ask(self, id_: int, step: int, ranks: Iterable[int], deadline: float) -> None:
        """Ranks are asked for a probe.

        Args:
            id_: Number of the decision that asks.
            step: Newest step reported; a probe of a later step is the one asked for.
            ranks: Who is asked.
            deadline: When it counts as lost.
        """
        self._id, self._after_step, self._deadline = id_, step, deadline
        self._missing = set(ranks)
        self.answered = False

    def take(self, rank: int, samples: Iterable[WireSample]) -> None:
        """Look for the probe in what a rank reports; it is over when all ranks have told."""
        if self._id and any(s.bucket < 0 and s.step > self._after_step for s in samples):
            self._missing.discard(rank)
            if not self._missing:
                self.clear()
                self.answered = True

    def pending(self, now: float) -> int:
        """Return the number of the decision whose probe is under way; 0 if none is."""
        if self._id and now >= self._deadline:
            self.clear()
        return self._id

    def clear(self) -> None:
        """Wait no longer: the samples came, or what was asked of the ranks may be lost."""
        self._id = 0
        self._missing.clear()

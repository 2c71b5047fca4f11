"""How the emulated link changes: by step number, so that every run meets the same schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from gradpilot.errors import ConfigError

LEAST_STEPS = 40
"""Shortest demo: every phase then lasts a few steps at least."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of steps with one link.

    Attributes:
        name: For people; may occur twice.
        first_step: First step of the phase.
        latency_seconds: One-way latency of a message, alpha.
        bits_per_second: Bandwidth of every rank's link.
    """

    name: str
    first_step: int
    latency_seconds: float
    bits_per_second: float

    @property
    def beta(self) -> float:
        """Return the time to push one byte, seconds."""
        return 8.0 / self.bits_per_second


@dataclass(frozen=True, slots=True)
class Schedule:
    """The phases of a run in order, the first from step 0.

    Attributes:
        phases: At least one.
        steps: Number of steps of the run.
    """

    phases: tuple[Phase, ...]
    steps: int

    def __post_init__(self) -> None:
        starts = [phase.first_step for phase in self.phases]
        ascending = all(a < b for a, b in itertools.pairwise([*starts, self.steps]))
        if not starts or starts[0] != 0 or not ascending:
            raise ConfigError(
                f"phases must start at step 0 and each later one before step {self.steps},"
                f" got starts {starts}"
            )

    def at(self, step: int) -> Phase:
        """Return the phase of a step; the last one for steps beyond the end."""
        return next(p for p in reversed(self.phases) if p.first_step <= max(step, 0))

    def spans(self) -> Iterator[tuple[Phase, int]]:
        """Yield every phase with the first step after it."""
        ends = [*(phase.first_step for phase in self.phases[1:]), self.steps]
        yield from zip(self.phases, ends, strict=True)


_LINKS = {
    "fast": (0.1e-3, 10e9),
    "slow": (1e-3, 50e6),
    "high latency": (20e-3, 1e9),
}
_FULL = (("fast", 180), ("slow", 80), ("high latency", 40), ("fast", 420))
_QUICK = (("fast", 50), ("slow", 45), ("high latency", 10), ("fast", 60))


def make_schedule(quick: bool = False, steps: int = 0) -> Schedule:
    """Return the schedule of the demo.

    Args:
        quick: The short one, for tests.
        steps: Total number of steps, shared out as in the chosen one; 0 for its own number.

    Raises:
        ConfigError: Fewer than ``LEAST_STEPS`` steps.
    """
    parts = _QUICK if quick else _FULL
    own = sum(length for _, length in parts)
    total = steps or own
    if total < LEAST_STEPS:
        raise ConfigError(f"the demo needs at least {LEAST_STEPS} steps, got {total}")
    phases, before = [], 0
    for name, length in parts:
        phases.append(Phase(name, round(before * total / own), *_LINKS[name]))
        before += length
    return Schedule(tuple(phases), total)

"""All runs that the controller has in memory; their number is bounded."""

from __future__ import annotations

from collections.abc import Iterator

from gradpilot.controller.errors import CapacityError
from gradpilot.controller.run import Run


class Runs:
    """All runs in memory.

    Args:
        limit: Most runs at once.
        grace_seconds: How long an ended run stays.
    """

    def __init__(self, limit: int = 1000, grace_seconds: float = 60.0) -> None:
        self._limit = limit
        self._grace = grace_seconds
        self._runs: dict[tuple[str, str], Run] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(tuple(self._runs.values()))

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, run: str, model: str) -> Run | None:
        """Return a run, or None."""
        return self._runs.get((run, model))

    def models(self, run: str) -> tuple[str, ...]:
        """Return the models of a run in memory, sorted."""
        return tuple(sorted(m for r, m in self._runs if r == run))

    def add(self, run: Run, now: float) -> Run:
        """Add a run and return it.

        Raises:
            CapacityError: There are too many.
        """
        self.expire(now)
        if len(self._runs) >= self._limit:
            raise CapacityError(f"this controller serves {self._limit} runs already (max_runs)")
        self._runs[run.run, run.model] = run
        return run

    def expire(self, now: float) -> tuple[Run, ...]:
        """Forget runs that ended longer than the grace ago; return them."""
        gone = [r for r in self if r.ended_at is not None and now - r.ended_at >= self._grace]
        for run in gone:
            del self._runs[run.run, run.model]
        return tuple(gone)

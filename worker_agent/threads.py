"""Threads that may block in collectives, so that neither training nor the exit has to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

STOP_SECONDS = 1.0
"""How long ``OrderedThread.stop`` waits for the job at hand."""


class OrderedThread:
    """Runs jobs one after another in the order in which they were given.

    A daemon: the pools of ``concurrent.futures`` are joined when the interpreter ends, which would
    hold the exit up for as long as a collective waits for a peer that is gone.

    The queue needs no bound of its own: a step's buckets, which DDP waits for, or one exchange, are
    the most that is ever in it.

    Args:
        name: Name of the thread.
        set_up: Called once in the thread before the first job.
    """

    def __init__(self, name: str, set_up: Callable[[], None] | None = None) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(set_up,), name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; it must not raise, failures belong into the future that it resolves."""
        self._jobs.put(job)

    def stop(self) -> bool:
        """End the thread after the jobs given so far.

        Returns:
            Whether it ended within ``STOP_SECONDS``; if not, it is stuck in a collective.
        """
        self._jobs.put(None)
        self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    def _run(self, set_up: Callable[[], None] | None) -> None:
        if set_up is not None:
            set_up()
        while (job := self._jobs.get()) is not None:
            job()
            # A job holds tensors of the step; do not keep them until the next one comes.
            del job

"""When to try again: back-off between two connections to the controller."""

from __future__ import annotations

import os
import random

from gradpilot.protos.transport import MAX_RECONNECT_MS

FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = MAX_RECONNECT_MS / 1000
"""Longest wait before the next try, so a controller that came back is found within 10 s."""

REFUSED_RETRY_SECONDS = 30.0
"""The same after a refusal that only a change on one of the two sides can lift."""

GOOD_SESSION_SECONDS = 5.0
"""A session that lasted so long starts the back-off anew."""

REFUSALS = frozenset(
    {
        "ABORTED",  # another process took this rank's place
        "ALREADY_EXISTS",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "UNIMPLEMENTED",
    }
)
"""Status codes that say: not like this."""


class Backoff:
    """Exponential back-off with full jitter, so that the ranks of a job do not return as one."""

    def __init__(self) -> None:
        self._attempt = 0
        self._random = random.Random(os.urandom(8))  # the global one belongs to the user

    def delay(
        self, code: str, asked_seconds: float | None, *, answered: bool, lasted_seconds: float
    ) -> float:
        """Return how long to wait after a session.

        Args:
            code: Name of the status code that it ended with; empty if with none.
            asked_seconds: When the controller asked to come back; None if it did not.
            answered: Whether a controller said Welcome.
            lasted_seconds: How long it was.
        """
        refused = code in REFUSALS
        if answered and not refused and lasted_seconds >= GOOD_SESSION_SECONDS:
            self._attempt = 0
        attempt, self._attempt = self._attempt, self._attempt + 1
        if asked_seconds is not None:
            # The controller said when; spread its agents a little behind that moment.
            return min(asked_seconds * self._random.uniform(1.0, 1.5), 10.0)
        most = REFUSED_RETRY_SECONDS if refused else LAST_RETRY_SECONDS
        return self._random.uniform(0.0, min(most, FIRST_RETRY_SECONDS * 2.0 ** min(attempt, 16)))

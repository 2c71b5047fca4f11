"""One connection to the controller: from Hello until one side ends it or is silent for too long."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from gradpilot.protos.messages import Hello
from gradpilot.worker_agent.outgoing import Dues

if TYPE_CHECKING:
    import grpc

HEARTBEAT_SECONDS = 30.0
"""Silence after which the client asks whether the controller lives.

Keepalive pings find a dead machine, but grpc answers them below a program that hangs.
"""


class Line:
    """What all sessions of one client share.

    Attributes:
        wake: Lock of everything that several threads touch; notified at every change.
        contact: When a controller was last heard, monotonic seconds.
        closing: Whether the client stops.
        close_by: When it must have stopped.
    """

    def __init__(self) -> None:
        self.wake = threading.Condition(threading.Lock())
        self.contact = time.monotonic()
        self.closing = False
        self.close_by = 0.0


class Session:
    """State and deadlines of one connection.

    Args:
        hello: What is said first.
        line: Shared with the client.
        timeout: Longest wait for an answer, seconds.

    Attributes:
        dues: What is to be said before anything else.
        controller: Id from Welcome; empty until then.
        over: Whether nothing more is sent or taken.
        code: Name of the status code that ended it; empty if none did.
        reason: Why it is over, for people.
        retry_seconds: When the controller asked to come back; None if it did not.
    """

    def __init__(self, hello: Hello, line: Line, timeout: float) -> None:
        self.dues = Dues(hello)
        self.controller = ""
        self.over = False
        self.code = ""
        self.reason = ""
        self.retry_seconds: float | None = None
        self._line = line
        self._timeout = timeout
        self._heard = time.monotonic()
        self._asked: float | None = None

    def heard(self) -> bool:
        """Note a sign of life; return whether the session goes on."""
        with self._line.wake:
            if self.over:
                return False
            self._line.contact = self._heard = time.monotonic()
            self._asked = None
            self._line.wake.notify_all()  # the deadline moved
            return True

    def end(self, reason: str, code: str = "", retry_seconds: float | None = None) -> None:
        """End the session; what ended it first is what is told."""
        with self._line.wake:
            if not self.over:
                self.over, self.reason, self.code = True, reason, code
                self.retry_seconds = retry_seconds
            self._line.wake.notify_all()

    def watch(self, channel: grpc.Channel) -> None:
        """Wait until the session is over, ended by the other side or by a deadline."""
        line = self._line
        while True:
            with line.wake:
                while not self.over:
                    deadline = self._deadline()
                    now = time.monotonic()
                    if now >= deadline:
                        break
                    line.wake.wait(deadline - now)
                if self.over:
                    return
                if not self.controller or self._asked is not None or line.closing:
                    self.over = True
                    self.reason = f"did not answer within {self._timeout:g} s"
                    return
                self._asked = now
            self._ask(channel)

    def _deadline(self) -> float:
        """Return when something must have happened; the lock is held."""
        if not self.controller:
            deadline = self._heard + self._timeout
        elif self._asked is None:
            deadline = self._heard + HEARTBEAT_SECONDS
        else:
            deadline = self._asked + self._timeout
        if self._line.closing:
            # Before a Welcome nothing may be sent, so there is nothing to wait for.
            deadline = min(deadline, self._line.close_by if self.controller else 0.0)
        return deadline

    def _ask(self, channel: grpc.Channel) -> None:
        """Ask the controller's program for a sign of life; the answer comes in grpc's thread."""
        import grpc

        def answered(call: Any) -> None:
            silent = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            # Any other status is an answer, too: there may be no health service.
            if call.code() not in (*silent, grpc.StatusCode.CANCELLED):
                self.heard()

        # As bytes: the messages are in a package that a training image need not have.
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/grpc.health.v1.Health/Check"
        )
        check.future(b"", timeout=self._timeout).add_done_callback(answered)

"""What waits to be sent to the controller: bounded, and in the order in which it is said.

Training puts things in and never waits; a thread of grpc's takes them out. Both hold the lock for
microseconds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gradpilot.errors import MessageTooLargeError
from gradpilot.protos import codec
from gradpilot.protos.messages import Ack, AgentMessage, Catalog, Hello, Report

if TYPE_CHECKING:
    from gradpilot.protos.v1 import controller_pb2

MOST_ACKS = 256


@dataclass(slots=True)
class ClientCounters:
    """Events since the start; they only grow.

    Attributes:
        sessions: Times that a controller said Welcome to a new connection.
        reports_dropped: Reports that the full queue or the size cap dropped.
        acks_dropped: Acknowledgements that their queue dropped.
        too_large: Messages that the size cap dropped, of any kind.
        plans_rejected: Plans that did not fit.
        plans_ignored: Plans that were not newer than the newest one seen.
        protocol_errors: Other messages that the controller must not have sent.
    """

    sessions: int = 0
    reports_dropped: int = 0
    acks_dropped: int = 0
    too_large: int = 0
    plans_rejected: int = 0
    plans_ignored: int = 0
    protocol_errors: int = 0


@dataclass(slots=True, eq=False)
class Dues:
    """What one session has still to say before anything from the queues; guarded by the lock.

    Attributes:
        hello: What is said first; None once it was.
        catalog: Whether the newest catalog has not been sent in this session.
        welcomed: Whether a controller answered, so that reports and acknowledgements may follow.
    """

    hello: Hello | None
    catalog: bool = True
    welcomed: bool = False


class Outgoing:
    """Queues of reports and acknowledgements, the newest catalog, and their encoding.

    Args:
        wake: Lock of the client; notified when there is something to send.
        counters: Where drops are counted.
        most_reports: Bound of the queue of reports; the oldest is dropped.
        say_once: Logs a warning of which the second argument, if not empty, is the key.
    """

    def __init__(
        self,
        wake: threading.Condition,
        counters: ClientCounters,
        most_reports: int,
        say_once: Callable[[str, str], None],
    ) -> None:
        self.catalog: Catalog | None = None
        """Newest catalog."""
        self._wake = wake
        self._counters = counters
        self._most_reports = most_reports
        self._say_once = say_once
        self._acks: deque[Ack] = deque()
        self._reports: deque[Report] = deque()
        self._encoded_catalog: tuple[Catalog, controller_pb2.AgentMessage] | None = None

    @property
    def reports(self) -> int:
        """Return the number of reports that wait."""
        return len(self._reports)

    def put_report(self, report: Report) -> None:
        """Queue a report, dropping the oldest one if need be; the lock is held."""
        if len(self._reports) >= self._most_reports:
            self._reports.popleft()
            self._counters.reports_dropped += 1
        self._reports.append(report)
        self._wake.notify_all()

    def put_ack(self, ack: Ack) -> None:
        """Queue an acknowledgement; the lock is held."""
        if len(self._acks) >= MOST_ACKS:
            self._acks.popleft()
            self._counters.acks_dropped += 1
        self._acks.append(ack)
        self._wake.notify_all()

    def next(self, dues: Dues) -> AgentMessage | None:
        """Take the next thing to say in a session, None if there is none; the lock is held."""
        if dues.hello is not None:
            hello, dues.hello = dues.hello, None
            return hello
        if dues.catalog and self.catalog is not None:
            dues.catalog = False
            return self.catalog
        if not dues.welcomed:
            return None  # what a controller may never take stays in the queues
        if self._acks:
            return self._acks.popleft()
        if self._reports:
            return self._reports.popleft()
        return None

    def encode(self, message: AgentMessage) -> controller_pb2.AgentMessage | None:
        """Return the envelope of a message; None if it cannot be sent, which is told once."""
        try:
            if isinstance(message, Catalog):
                # Large, and sent again at every connection.
                if self._encoded_catalog is None or self._encoded_catalog[0] is not message:
                    self._encoded_catalog = (message, codec.encode_agent(message))
                return self._encoded_catalog[1]
            return codec.encode_agent(message)
        except MessageTooLargeError as error:
            self._counters.too_large += 1
            if isinstance(message, Report):
                self._counters.reports_dropped += 1
            kind = type(message).__name__
            self._say_once(f"{kind} not sent: {error}", f"too large {kind}")
            if isinstance(message, Hello) and message.plan is not None:
                return codec.encode_agent(replace(message, plan=None))
        except Exception as error:
            self._say_once(f"{type(message).__name__} cannot be sent: {error!r}", "")
        return None

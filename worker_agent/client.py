"""The connection to the controller: one stream, never in training's way.

Callers on the training side only put things into bounded queues. Two threads of ours do the rest:
one connects, watches deadlines and connects again; one reads. grpc's own thread pulls what is to be
sent out of ``_outgoing``. All of them are daemons, wait without polling and hold the one lock for
microseconds, so a controller that is dead, slow or silent costs training nothing.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import gradpilot.worker_agent
from gradpilot.errors import ConfigError, GradpilotError, MessageTooLargeError, ProtocolError
from gradpilot.protos import codec, validate
from gradpilot.protos.messages import (
    Ack,
    AgentMessage,
    Catalog,
    GoingAway,
    Hello,
    Plan,
    ProbeRequest,
    Report,
    Welcome,
)
from gradpilot.protos.transport import CLIENT_OPTIONS, MAX_RECONNECT_MS
from gradpilot.worker_agent.config import AgentConfig

if TYPE_CHECKING:
    import grpc

    from gradpilot.protos.v1 import controller_pb2

log = logging.getLogger("gradpilot.agent")

HEARTBEAT_SECONDS = 30.0
"""Silence after which the client asks whether the controller lives.

Keepalive pings find a dead machine, but grpc answers them below a program that hangs.
"""

FIRST_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = MAX_RECONNECT_MS / 1000
"""Longest wait before the next try, so a controller that came back is found within 10 s."""

REFUSED_RETRY_SECONDS = 30.0
"""The same after a refusal that only a change on one of the two sides can lift."""

_GOOD_SESSION_SECONDS = 5.0
"""A session that lasted so long starts the back-off anew."""

_MAX_ACKS = 256

_REFUSALS = frozenset(
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
class _Session:
    """One connection; guarded by the client's lock but for what only one thread touches."""

    hello: Hello | None
    """What is said first; None once it was."""
    heard: float
    """When the controller was last heard in this session, or the session began."""
    catalog_due: bool = True
    controller: str = ""
    """Id from Welcome; empty until then."""
    asked: float | None = None
    """When the controller was asked for a sign of life; None if one came since."""
    over: bool = False
    code: str = ""
    reason: str = ""
    retry_seconds: float | None = None


def _nothing(_: object) -> None:
    """Ignore a message."""


class ControllerClient:
    """Talks to the controller on behalf of one model on one rank.

    ``send_report``, ``send_ack`` and ``set_catalog`` never wait and never raise; in a forked child
    they do nothing. Callbacks run in the client's reading thread; what they raise is contained.

    Args:
        address: ``host:port`` of the controller.
        hello: Returns the present Hello; called for every connection, so step and plan are fresh.
        config: Queue bound and time-out.
        world_size: Ranks in the group of the model, against which plans are checked.
    """

    def __init__(
        self, address: str, hello: Callable[[], Hello], config: AgentConfig, *, world_size: int
    ) -> None:
        self.address = address
        self.world_size = world_size
        self.counters = ClientCounters()
        self.welcome: Welcome | None = None
        """Newest Welcome."""
        self._hello = hello
        self._timeout = config.control_timeout_seconds
        self._max_reports = config.queue_reports
        self._pid = os.getpid()
        self._wake = threading.Condition(threading.Lock())
        self._acks: deque[Ack] = deque()
        self._reports: deque[Report] = deque()
        self._catalog: Catalog | None = None
        self._encoded_catalog: tuple[Catalog, controller_pb2.AgentMessage] | None = None
        self._session: _Session | None = None
        self._closing = False
        self._close_by = 0.0
        self._contact = time.monotonic()
        self._newest = (-1, -1)
        self._rank = 0
        self._said: set[str] = set()
        self._outage = False
        self._random = random.Random(os.urandom(8))  # the global one belongs to the user
        self._thread: threading.Thread | None = None
        self._on_plan: Callable[[Plan], None] = _nothing
        self._on_probe: Callable[[ProbeRequest], None] = _nothing
        self._on_welcome: Callable[[Welcome], None] = _nothing

    # --- the training side ---------------------------------------------------------------------

    def start(
        self,
        *,
        on_plan: Callable[[Plan], None] = _nothing,
        on_probe: Callable[[ProbeRequest], None] = _nothing,
        on_welcome: Callable[[Welcome], None] = _nothing,
    ) -> None:
        """Begin to connect; returns at once.

        Args:
            on_plan: Takes a plan that is well formed, fits the layout and is newer than any before.
                If it returns, the plan is acknowledged as held; if it raises, as rejected.
            on_probe: Takes a probe request.
            on_welcome: Takes the controller's settings, once per connection at least.
        """
        if self._thread is not None or self._closing or not self._own_process():
            return
        if gradpilot.worker_agent.GRPC_IMPORTED_EARLY:
            self._say_once(
                "grpc was imported before gradpilot and without GRPC_ENABLE_FORK_SUPPORT=0;"
                " forked DataLoader workers may be slow or noisy: import gradpilot first, or set it"
            )
        self._on_plan, self._on_probe, self._on_welcome = on_plan, on_probe, on_welcome
        self._contact = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gradpilot-control", daemon=True)
        self._thread.start()

    def send_report(self, report: Report) -> None:
        """Queue a report; a full queue drops its oldest one."""
        if not self._own_process():
            return
        with self._wake:
            if self._closing:
                return
            if len(self._reports) >= self._max_reports:
                self._reports.popleft()
                self.counters.reports_dropped += 1
            self._reports.append(report)
            self._wake.notify_all()

    def send_ack(self, ack: Ack) -> None:
        """Queue an acknowledgement; it is sent before any report and outlives them."""
        if not self._own_process():
            return
        with self._wake:
            if self._closing:
                return
            if len(self._acks) >= _MAX_ACKS:
                self._acks.popleft()
                self.counters.acks_dropped += 1
            self._acks.append(ack)
            self._wake.notify_all()

    def set_catalog(self, catalog: Catalog) -> None:
        """Send this catalog now and at every connection, instead of any earlier one."""
        if not self._own_process():
            return
        with self._wake:
            self._catalog = catalog
            if self._session is not None:
                self._session.catalog_due = True
            self._wake.notify_all()

    @property
    def dropped(self) -> int:
        """Return the number of reports that were dropped."""
        return self.counters.reports_dropped

    @property
    def connected(self) -> bool:
        """Return whether a controller has answered on the present connection."""
        session = self._session
        return session is not None and bool(session.controller) and not session.over

    def seconds_since_contact(self) -> float:
        """Return how long no controller was heard; from ``start`` on if it never was.

        A controller with nothing to say is heard every ``HEARTBEAT_SECONDS``.
        """
        return time.monotonic() - self._contact

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued if the controller takes it, and stop; returns within the time-out."""
        if not self._own_process():
            return
        with self._wake:
            self._closing = True
            self._close_by = time.monotonic() + 0.7 * timeout  # the rest is for cancelling
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _own_process(self) -> bool:
        """Return whether this is not a forked child, which has neither threads nor a safe lock."""
        return os.getpid() == self._pid

    # --- connecting ----------------------------------------------------------------------------

    def _run(self) -> None:
        attempt = 0
        while not self._closing:
            started = time.monotonic()
            try:
                session = self._connect()
            except Exception as error:  # the thread must outlive whatever grpc or a callback does
                self._say_once(f"cannot talk to the controller: {error!r}")
                session = None
            good = session is not None and session.controller and session.code not in _REFUSALS
            if good and time.monotonic() - started >= _GOOD_SESSION_SECONDS:
                attempt = 0
            delay = self._delay(session, attempt)
            attempt += 1
            with self._wake:
                self._wake.wait_for(lambda: self._closing, delay)

    def _connect(self) -> _Session:
        """Open a session, watch over it, and return it when it is over."""
        import grpc  # here, so that importing the agent stays cheap

        from gradpilot.protos.v1.controller_pb2_grpc import ControllerServiceStub

        hello = self._hello()
        self._rank = hello.rank
        if hello.plan is not None:
            self._newest = max(self._newest, hello.plan.key)
        now = time.monotonic()
        session = _Session(hello, heard=now)
        # A pool of its own: subchannels shared with the last try would keep grpc's back-off.
        options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        channel = grpc.insecure_channel(self.address, options=options)
        try:
            with self._wake:
                self._session = session
            call = ControllerServiceStub(channel).Session(self._outgoing(session))
            reader = threading.Thread(
                target=self._read, args=(session, call), name="gradpilot-read", daemon=True
            )
            reader.start()
            self._watch(session, channel)
            call.cancel()
            reader.join(1.0)
        finally:
            with self._wake:
                session.over = True
                self._session = None
                self._wake.notify_all()
            channel.close()
        self._tell_end(session)
        return session

    def _watch(self, session: _Session, channel: grpc.Channel) -> None:
        """Wait until the session is over, ended by the other side or by a deadline."""
        while True:
            with self._wake:
                while not session.over:
                    deadline = self._deadline(session)
                    now = time.monotonic()
                    if now >= deadline:
                        break
                    self._wake.wait(deadline - now)
                if session.over:
                    return
                ask = session.controller and session.asked is None and not self._closing
                if not ask:
                    session.over = True
                    session.reason = f"did not answer within {self._timeout:g} s"
                    return
                session.asked = now
            self._ask(session, channel)

    def _deadline(self, session: _Session) -> float:
        """Return when something must have happened; the lock is held."""
        if not session.controller:
            deadline = session.heard + self._timeout
        elif session.asked is None:
            deadline = session.heard + HEARTBEAT_SECONDS
        else:
            deadline = session.asked + self._timeout
        if self._closing:
            # Before a Welcome nothing may be sent, so there is nothing to wait for.
            deadline = min(deadline, self._close_by if session.controller else 0.0)
        return deadline

    def _ask(self, session: _Session, channel: grpc.Channel) -> None:
        """Ask the controller's program for a sign of life; the answer comes in grpc's thread."""
        import grpc

        def answered(call: Any) -> None:
            silent = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            # Any other status is an answer, too: there may be no health service.
            if call.code() not in (*silent, grpc.StatusCode.CANCELLED):
                self._heard(session)

        # As bytes: the messages are in a package that a training image need not have.
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/grpc.health.v1.Health/Check"
        )
        check.future(b"", timeout=self._timeout).add_done_callback(answered)

    def _heard(self, session: _Session) -> bool:
        """Note a sign of life; return whether the session goes on."""
        with self._wake:
            if session.over:
                return False
            self._contact = session.heard = time.monotonic()
            session.asked = None
            self._wake.notify_all()  # the deadline moved
            return True

    def _delay(self, session: _Session | None, attempt: int) -> float:
        """Return how long to wait before the next try: exponential with full jitter."""
        if session is not None and session.retry_seconds is not None:
            # The controller said when; spread its agents a little behind that moment.
            return min(session.retry_seconds * self._random.uniform(1.0, 1.5), 10.0)
        refused = session is not None and session.code in _REFUSALS
        most = REFUSED_RETRY_SECONDS if refused else LAST_RETRY_SECONDS
        return self._random.uniform(0.0, min(most, FIRST_RETRY_SECONDS * 2.0 ** min(attempt, 16)))

    # --- sending -------------------------------------------------------------------------------

    def _outgoing(self, session: _Session) -> Iterator[controller_pb2.AgentMessage]:
        """Yield what is to be sent; runs in a thread of grpc's. Ends with the session."""
        while True:
            with self._wake:
                while (message := self._next(session)) is None:
                    if session.over or self._closing:
                        return
                    self._wake.wait()
            envelope = self._encode(message)
            if envelope is not None:
                yield envelope

    def _next(self, session: _Session) -> AgentMessage | None:
        """Take the next thing to send, None if there is none; the lock is held."""
        if session.over:
            return None
        if session.hello is not None:
            hello, session.hello = session.hello, None
            return hello
        if session.catalog_due and self._catalog is not None:
            session.catalog_due = False
            return self._catalog
        if not session.controller:
            return None  # what a controller may never take stays in the queues
        if self._acks:
            return self._acks.popleft()
        if self._reports:
            return self._reports.popleft()
        return None

    def _encode(self, message: AgentMessage) -> controller_pb2.AgentMessage | None:
        try:
            if isinstance(message, Catalog):
                # Large, and sent again at every connection.
                if self._encoded_catalog is None or self._encoded_catalog[0] is not message:
                    self._encoded_catalog = (message, codec.encode_agent(message))
                return self._encoded_catalog[1]
            return codec.encode_agent(message)
        except MessageTooLargeError as error:
            self.counters.too_large += 1
            if isinstance(message, Report):
                self.counters.reports_dropped += 1
            kind = type(message).__name__
            self._say_once(f"{kind} not sent: {error}", key=f"too large {kind}")
            if isinstance(message, Hello) and message.plan is not None:
                return codec.encode_agent(replace(message, plan=None))
        except Exception as error:
            self._say_once(f"{type(message).__name__} cannot be sent: {error!r}")
        return None

    # --- receiving -----------------------------------------------------------------------------

    def _read(self, session: _Session, call: Iterator[controller_pb2.ControllerMessage]) -> None:
        import grpc

        code, reason = "", "ended the session"
        try:
            for envelope in call:
                self._receive(session, envelope)
        except grpc.RpcError as error:
            status = error.code() if isinstance(error, grpc.Call) else None
            code = status.name if status is not None else "UNKNOWN"
            reason = (error.details() if isinstance(error, grpc.Call) else None) or repr(error)
        except Exception as error:
            reason = f"cannot be read: {error!r}"
        with self._wake:
            if not session.over:
                session.over, session.code, session.reason = True, code, reason
            self._wake.notify_all()

    def _receive(self, session: _Session, envelope: controller_pb2.ControllerMessage) -> None:
        try:
            if not self._heard(session):
                return
            message = codec.decode_controller(envelope)
            match message:
                case Welcome():
                    validate.validate_welcome(message)
                    self._take_welcome(session, message)
                case GoingAway():
                    validate.validate_going_away(message)
                    self._take_farewell(session, message)
                case Plan() | ProbeRequest() if not session.controller:
                    raise ProtocolError(f"{type(message).__name__} came before Welcome")
                case Plan():
                    self._take_plan(message)
                case ProbeRequest():
                    validate.validate_probe_request(message)
                    self._on_probe(message)
        except ProtocolError as error:
            self.counters.protocol_errors += 1
            self._say_once(f"ignored a message of the controller: {error}")
        except Exception as error:
            self._say_once(f"a message of the controller could not be handled: {error!r}")

    def _take_welcome(self, session: _Session, welcome: Welcome) -> None:
        with self._wake:
            first = not session.controller
            if not first and session.controller != welcome.controller:
                # Another process answers on this stream; it has not heard our Hello.
                session.over, session.reason = True, "changed within a session"
                self._wake.notify_all()
                return
            session.controller = welcome.controller
            self._wake.notify_all()
        self.welcome = welcome
        if first:
            self.counters.sessions += 1
            self._outage = False
            self._say(logging.INFO, "connected to controller %s (%s)", self.address, welcome)
        self._on_welcome(welcome)

    def _take_farewell(self, session: _Session, farewell: GoingAway) -> None:
        with self._wake:
            session.over = True
            session.reason = f"goes away: {farewell.reason}"
            session.retry_seconds = farewell.reconnect_seconds
            self._wake.notify_all()

    def _take_plan(self, plan: Plan) -> None:
        """Offer a newer plan to the agent and acknowledge what became of it."""
        if plan.key <= self._newest:
            self.counters.plans_ignored += 1
            return
        state, reason = "held", ""
        try:
            catalog = self._catalog
            if catalog is None:
                raise ConfigError("a plan came before this rank has sent a catalog")
            validate.validate_plan(plan, catalog.layout, self.world_size)
            self._on_plan(plan)
            self._newest = plan.key
        except Exception as error:
            known = isinstance(error, GradpilotError)
            state, reason = "rejected", str(error) if known else repr(error)
            self.counters.plans_rejected += 1
            self._say_once(f"rejected a plan of the controller: {reason}")
        self.send_ack(Ack(plan.term, plan.id, state, self._hello().step, reason))

    # --- telling people ------------------------------------------------------------------------

    def _tell_end(self, session: _Session) -> None:
        """Log the end of a session, once per outage; refusals on every rank, the rest on rank 0."""
        if self._closing:
            return
        if session.code in _REFUSALS:
            self._say_once(f"controller {self.address} refuses this agent: {session.reason}")
            return
        level = logging.DEBUG if self._outage else logging.WARNING
        self._outage = True
        self._say(
            level,
            "controller %s %s; training goes on with the plan in force, trying again",
            self.address,
            session.reason if not session.code else f"is lost ({session.code}: {session.reason})",
        )

    def _say(self, level: int, message: str, *args: object) -> None:
        """Log on rank 0, where one line stands for all ranks; elsewhere for debugging only."""
        log.log(level if self._rank == 0 else logging.DEBUG, message, *args)

    def _say_once(self, message: str, key: str = "") -> None:
        """Log a warning that has not been said yet; the number of different ones is bounded."""
        key = key or message
        if key not in self._said and len(self._said) < 50:
            self._said.add(key)
            log.warning("%s", message)

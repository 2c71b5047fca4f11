"""The connection to the controller: one stream, never in training's way.

Callers on the training side only put things into bounded queues (``outgoing``). Two threads of ours
do the rest: one connects, watches deadlines (``session``) and connects again (``retries``); one
reads (``incoming``). grpc's own thread pulls what is to be sent. All of them are daemons, wait
without polling and hold the one lock for microseconds, so a controller that is dead, slow or silent
costs training nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import gradpilot.worker_agent
from gradpilot.protos.messages import Ack, Catalog, Hello, Plan, ProbeRequest, Report, Welcome
from gradpilot.protos.transport import CLIENT_OPTIONS
from gradpilot.worker_agent.config import AgentConfig
from gradpilot.worker_agent.incoming import Incoming, nothing
from gradpilot.worker_agent.outgoing import ClientCounters, Outgoing
from gradpilot.worker_agent.retries import REFUSALS, Backoff
from gradpilot.worker_agent.session import Line, Session

if TYPE_CHECKING:
    from gradpilot.protos.v1 import controller_pb2

__all__ = ["ClientCounters", "ControllerClient"]

log = logging.getLogger("gradpilot.agent")


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
        self._hello = hello
        self._timeout = config.control_timeout_seconds
        self._pid = os.getpid()
        self._line = Line()
        self._wake = self._line.wake
        self._outgoing = Outgoing(self._wake, self.counters, config.queue_reports, self._say_once)
        self._incoming = Incoming(
            line=self._line,
            counters=self.counters,
            world_size=world_size,
            catalog=lambda: self._outgoing.catalog,
            step=lambda: self._hello().step,
            send_ack=self.send_ack,
            say_once=self._say_once,
        )
        self._incoming.on_first_welcome = self._tell_begin
        self._session: Session | None = None
        self._backoff = Backoff()
        self._rank = 0
        self._said: set[str] = set()
        self._outage = False
        self._thread: threading.Thread | None = None

    # --- the training side ---------------------------------------------------------------------

    def start(
        self,
        *,
        on_plan: Callable[[Plan], None] = nothing,
        on_probe: Callable[[ProbeRequest], None] = nothing,
        on_welcome: Callable[[Welcome], None] = nothing,
    ) -> None:
        """Begin to connect; returns at once.

        Args:
            on_plan: Takes a plan that is well formed, fits the layout and is newer than any before.
                If it returns, the plan is acknowledged as held; if it raises, as rejected.
            on_probe: Takes a probe request.
            on_welcome: Takes the controller's settings, once per connection at least.
        """
        if self._thread is not None or self._line.closing or not self._own_process():
            return
        if gradpilot.worker_agent.GRPC_IMPORTED_EARLY:
            self._say_once(
                "grpc was imported before gradpilot and without GRPC_ENABLE_FORK_SUPPORT=0;"
                " forked DataLoader workers may be slow or noisy: import gradpilot first, or set it"
            )
        self._incoming.on_plan, self._incoming.on_probe = on_plan, on_probe
        self._incoming.on_welcome = on_welcome
        self._line.contact = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="gradpilot-control", daemon=True)
        self._thread.start()

    def send_report(self, report: Report) -> None:
        """Queue a report; a full queue drops its oldest one."""
        if not self._own_process():
            return
        with self._wake:
            if not self._line.closing:
                self._outgoing.put_report(report)

    def send_ack(self, ack: Ack) -> None:
        """Queue an acknowledgement; it is sent before any report and outlives them."""
        if not self._own_process():
            return
        with self._wake:
            if not self._line.closing:
                self._outgoing.put_ack(ack)

    def set_catalog(self, catalog: Catalog) -> None:
        """Send this catalog now and at every connection, instead of any earlier one."""
        if not self._own_process():
            return
        with self._wake:
            self._outgoing.catalog = catalog
            if self._session is not None:
                self._session.dues.catalog = True
            self._wake.notify_all()

    @property
    def welcome(self) -> Welcome | None:
        """Return the newest Welcome, None before the first."""
        return self._incoming.welcome

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

        A controller with nothing to say is heard every ``session.HEARTBEAT_SECONDS``.
        """
        return time.monotonic() - self._line.contact

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued if the controller takes it, and stop; returns within the time-out."""
        if not self._own_process():
            return
        with self._wake:
            self._line.closing = True
            self._line.close_by = time.monotonic() + 0.7 * timeout  # the rest is for cancelling
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _own_process(self) -> bool:
        """Return whether this is not a forked child, which has neither threads nor a safe lock."""
        return os.getpid() == self._pid

    # --- connecting ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._line.closing:
            started = time.monotonic()
            try:
                session = self._connect()
            except Exception as error:  # the thread must outlive whatever grpc or a callback does
                self._say_once(f"cannot talk to the controller: {error!r}")
                session = None
            delay = self._backoff.delay(
                session.code if session is not None else "",
                session.retry_seconds if session is not None else None,
                answered=session is not None and bool(session.controller),
                lasted_seconds=time.monotonic() - started,
            )
            with self._wake:
                self._wake.wait_for(lambda: self._line.closing, delay)

    def _connect(self) -> Session:
        """Open a session, watch over it, and return it when it is over."""
        import grpc  # here, so that importing the agent stays cheap

        from gradpilot.protos.v1.controller_pb2_grpc import ControllerServiceStub

        hello = self._hello()
        self._rank = hello.rank
        if hello.plan is not None:
            self._incoming.newest = max(self._incoming.newest, hello.plan.key)
        session = Session(hello, self._line, self._timeout)
        # A pool of its own: subchannels shared with the last try would keep grpc's back-off.
        options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        channel = grpc.insecure_channel(self.address, options=options)
        try:
            with self._wake:
                self._session = session
            call = ControllerServiceStub(channel).Session(self._speak(session))
            reader = threading.Thread(
                target=self._read, args=(session, call), name="gradpilot-read", daemon=True
            )
            reader.start()
            session.watch(channel)
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

    def _speak(self, session: Session) -> Iterator[controller_pb2.AgentMessage]:
        """Yield what is to be sent; runs in a thread of grpc's. Ends with the session."""
        while True:
            with self._wake:
                while session.over or (message := self._outgoing.next(session.dues)) is None:
                    if session.over or self._line.closing:
                        return
                    self._wake.wait()
            envelope = self._outgoing.encode(message)
            if envelope is not None:
                yield envelope

    def _read(self, session: Session, call: Iterator[controller_pb2.ControllerMessage]) -> None:
        import grpc

        code, reason = "", "ended the session"
        try:
            for envelope in call:
                self._incoming.take(session, envelope)
        except grpc.RpcError as error:
            status = error.code() if isinstance(error, grpc.Call) else None
            code = status.name if status is not None else "UNKNOWN"
            reason = (error.details() if isinstance(error, grpc.Call) else None) or repr(error)
        except Exception as error:
            reason = f"cannot be read: {error!r}"
        session.end(reason, code)

    # --- telling people ------------------------------------------------------------------------

    def _tell_begin(self, welcome: Welcome) -> None:
        self._outage = False
        self._say(logging.INFO, "connected to controller %s (%s)", self.address, welcome)

    def _tell_end(self, session: Session) -> None:
        """Log the end of a session, once per outage; refusals on every rank, the rest on rank 0."""
        if self._line.closing:
            return
        if session.code in REFUSALS:
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

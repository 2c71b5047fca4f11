"""Open sessions of agents and watchers, and what goes out to them.

Nothing here waits for a peer: a message is put into a bounded outbox and the peer's own task takes
it out, so a stuck agent holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Generic, TypeVar

from gradpilot.controller.errors import RefusedError, ReplacedError
from gradpilot.controller.plans import MAX_NUMBER
from gradpilot.controller.run import Run
from gradpilot.controller.runs import Runs
from gradpilot.controller.store import Store
from gradpilot.controller.views import to_store
from gradpilot.errors import MessageTooLargeError, ProtocolError
from gradpilot.protos.messages import (
    Ack,
    Catalog,
    ControllerMessage,
    Decision,
    GoingAway,
    Hello,
    Report,
    Welcome,
)
from gradpilot.protos.validate import validate_ack, validate_catalog

logger = logging.getLogger(__name__)

WATCH_QUEUE = 64
"""Decisions that may wait for a watcher; the oldest is dropped."""

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages waiting for one peer.

    Args:
        limit: Most messages; the oldest is dropped.
        one_of_kind: Whether a message replaces a waiting one of its type.
    """

    def __init__(self, limit: int, *, one_of_kind: bool = False) -> None:
        self._limit = limit
        self._one_of_kind = one_of_kind
        self._queue: deque[T] = deque()
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self.closed = False
        self.dropped = 0

    def put(self, message: T) -> None:
        """Add a message; nothing happens if the outbox is closed."""
        if self.closed:
            return
        if self._one_of_kind:
            self._queue = deque(m for m in self._queue if type(m) is not type(message))
        if len(self._queue) >= self._limit:
            self._queue.popleft()
            self.dropped += 1
        self._queue.append(message)
        self._wake.set()

    def close(self, error: Exception | None = None) -> None:
        """End the stream after what waits; ``error`` is then raised to the reader."""
        if not self.closed:
            self.closed, self._error = True, error
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            while self._queue:
                yield self._queue.popleft()
            if self.closed:
                break
            self._wake.clear()
            await self._wake.wait()
        if self._error is not None:
            raise self._error


class AgentSession:
    """One open stream of one rank."""

    def __init__(self, run: Run, hello: Hello) -> None:
        self.run = run
        self.rank = hello.rank
        self.hello = hello
        self.outbox: Outbox[ControllerMessage] = Outbox(8, one_of_kind=True)
        self.logged: set[str] = set()
        """Reasons of refusals that were logged already."""

    @property
    def where(self) -> dict[str, object]:
        """Return the fields that name the session in a log line."""
        return {"run": self.run.run, "model": self.run.model, "rank": self.rank}


class Sessions:
    """All open sessions and watchers.

    Args:
        runs: All runs.
        store: The state file.
        welcome: Makes the answer to Hello.
    """

    def __init__(
        self,
        runs: Runs,
        store: Store,
        welcome: Callable[[], Welcome],
    ) -> None:
        self._runs = runs
        self._store = store
        self._welcome = welcome
        self.on_news: Callable[[Run], None] = _ignore
        """Called when a run may be due for a decision."""
        self.on_layout: Callable[[Run], None] = _ignore
        """Called when a run has a new layout."""
        self._open: dict[tuple[str, str, int], AgentSession] = {}
        self._watchers: dict[tuple[str, str], set[Outbox[Decision]]] = {}
        self._joining = asyncio.Lock()
        self._going_away: GoingAway | None = None

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, hello: Hello) -> AgentSession:
        """Start the session of a rank; a session that the rank had before is closed.

        Raises:
            RefusedError: See ``Run.join``.
            CapacityError: Too many runs.
            StoreError: The state file cannot be read.
        """
        if hello.plan is not None and max(hello.plan.key) >= MAX_NUMBER:
            raise RefusedError(f"no controller made a plan with key {hello.plan.key}", "session")
        async with self._joining:
            if hello.plan is not None and hello.plan.term > self._store.term:
                old = self._store.term
                await self._store.raise_term(hello.plan.term)
                logger.warning(
                    "an agent holds a plan of a later term; the state file was lost or is older",
                    extra={"run": hello.run, "term": self._store.term, "old_term": old},
                )
            run = await self.load(hello.run, hello.model)
            started = hello.incarnation != run.incarnation
            try:
                run.join(hello, time.monotonic())
            except RefusedError as error:
                run.refuse(error.reason)
                raise
            if started:
                self._close_others(run, hello)
            session = AgentSession(run, hello)
            key = (run.run, run.model, hello.rank)
            replaced = self._open.get(key)
            self._open[key] = session
        if replaced is not None:
            replaced.outbox.close(
                ReplacedError(f"rank {hello.rank} opened a newer session", "session")
            )
        session.outbox.put(self._welcome())
        if self._going_away is not None:
            session.outbox.put(self._going_away)
            session.outbox.close()
        if started:
            await self._store.save_run(to_store(run))
        logger.info(
            "rank connected",
            extra={**session.where, "node": hello.node, "ranks": run.connected},
        )
        return session

    async def load(self, run: str, model: str) -> Run:
        """Return a run from memory, else from the store, else a new one."""
        known = self._runs.get(run, model)
        if known is not None:
            return known
        memory = await self._store.load(run, model)
        known = self._runs.get(run, model)  # another task may have been faster
        now = time.monotonic()
        return known or self._runs.add(Run(run, model, memory, now), now)

    def close(self, session: AgentSession) -> None:
        """The stream of a rank ended."""
        session.outbox.close()
        key = (session.run.run, session.run.model, session.rank)
        if self._open.get(key) is not session:
            return  # replaced
        del self._open[key]
        session.run.leave(session.rank, time.monotonic())
        self.on_news(session.run)
        logger.info("rank left", extra={**session.where, "ranks": session.run.connected})

    def take(self, session: AgentSession, message: Hello | Catalog | Report | Ack) -> None:
        """Take what an agent says after its hello.

        Raises:
            RefusedError: The session must end.
        """
        if session.outbox.closed:
            return
        if isinstance(message, Report):
            self._report(session, message)
        elif isinstance(message, Catalog):
            self._catalog(session, message)
        elif isinstance(message, Ack):
            self._ack(session, message)
        else:
            session.run.refuse("session")
            raise RefusedError("a session says hello once", "session")

    def malformed(self, session: AgentSession, error: ProtocolError) -> None:
        """A message could not even be read; only an oversized one ends the session.

        Raises:
            MessageTooLargeError: The message exceeds the cap.
        """
        if isinstance(error, MessageTooLargeError):
            session.run.refuse("too_large")
            raise error
        session.run.refuse("invalid")
        self._log_once(session, "invalid", str(error))

    def send(self, run: Run, message: ControllerMessage) -> None:
        """Send to every rank of a run."""
        for (name, model, _), session in self._open.items():
            if (name, model) == (run.run, run.model):
                session.outbox.put(message)

    def publish(self, run: Run, decision: Decision) -> None:
        """Send a decision to whoever watches the run."""
        for outbox in self._watchers.get((run.run, run.model), ()):
            outbox.put(decision)

    @contextlib.contextmanager
    def watching(self, run: Run) -> Iterator[Outbox[Decision]]:
        """Fill an outbox with the decisions of a run as they are taken."""
        outbox: Outbox[Decision] = Outbox(WATCH_QUEUE)
        key = (run.run, run.model)
        self._watchers.setdefault(key, set()).add(outbox)
        if self._going_away is not None:
            outbox.close()
        try:
            yield outbox
        finally:
            self._watchers[key].discard(outbox)
            if not self._watchers[key]:
                del self._watchers[key]

    def say_goodbye(self, message: GoingAway) -> None:
        """Tell every agent that the controller stops and end all streams."""
        self._going_away = message
        for session in self._open.values():
            session.outbox.put(message)
            session.outbox.close()
        for watchers in self._watchers.values():
            for outbox in watchers:
                outbox.close()

    def _close_others(self, run: Run, hello: Hello) -> None:
        for key, session in list(self._open.items()):
            if key[:2] == (run.run, run.model):
                del self._open[key]
                session.outbox.close(
                    ReplacedError(
                        f"the job was started again as incarnation {hello.incarnation!r}",
                        "session",
                    )
                )

    def _catalog(self, session: AgentSession, catalog: Catalog) -> None:
        run = session.run
        try:
            validate_catalog(catalog)
            changed = run.set_catalog(session.rank, catalog)
        except RefusedError as error:
            run.refuse(error.reason)
            raise
        except ProtocolError as error:
            run.refuse("catalog")
            raise RefusedError(f"catalog refused: {error}", "catalog") from None
        newest, held = run.plans.newest, session.hello.plan
        if (
            newest is not None
            and catalog.layout.digest == newest.layout
            and (held is None or held.key < newest.key)
        ):
            session.outbox.put(newest)
        if changed:
            logger.info("new layout", extra={**session.where, "layout": catalog.layout.digest})
            self.on_layout(run)

    def _report(self, session: AgentSession, report: Report) -> None:
        try:
            reason = session.run.add_report(session.rank, report, time.monotonic())
        except ProtocolError as error:
            self._log_once(session, "invalid", str(error))
            return
        if reason:
            self._log_once(session, reason, f"sequence {report.sequence}, layout {report.layout}")
            return
        self.on_news(session.run)

    def _ack(self, session: AgentSession, ack: Ack) -> None:
        try:
            validate_ack(ack)
        except ProtocolError as error:
            self.malformed(session, error)
            return
        extra = {**session.where, "plan_id": ack.id, "step": ack.step}
        if ack.state == "rejected":
            logger.warning("plan rejected: %s", ack.reason, extra=extra)
        else:
            logger.debug("plan %s", ack.state, extra=extra)
        if session.run.acknowledge(session.rank, ack):
            self.on_news(session.run)

    def _log_once(self, session: AgentSession, reason: str, detail: str) -> None:
        if reason not in session.logged:
            session.logged.add(reason)
            logger.warning(
                "refused a message (%s): %s; further ones are counted only",
                reason,
                detail,
                extra=session.where,
            )


def _ignore(run: Run) -> None:
    pass

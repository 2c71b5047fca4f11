"""What must survive a restart: the term, what operators ordered, and the decisions.

SQLite in WAL mode with ``synchronous=FULL``: a plan that agents may have seen is on disk. The store
is an aid, not a must: agents push their state when they connect again. One thread owns the
database; the event loop only awaits it. A lock file beside the database keeps a second controller
out, since two of them would number their plans alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.pool import StaticPool

from gradpilot.controller.errors import StoreError
from gradpilot.errors import ProtocolError
from gradpilot.protos.explanations import Since
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import Decision, Option, Plan

MEMORY = ":memory:"
SCHEMA = 1
RETIRED_KEPT = 16
"""Incarnations of a run that are remembered in order to refuse them."""

logger = logging.getLogger(__name__)
T = TypeVar("T")

_metadata = sa.MetaData()
_meta = sa.Table(
    "meta",
    _metadata,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("value", sa.Integer, nullable=False),
)
_runs = sa.Table(
    "runs",
    _metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("incarnation", sa.Text, nullable=False),
    sa.Column("retired", sa.Text, nullable=False),  # JSON list, newest last
    sa.Column("frozen", sa.Boolean, nullable=False),
    sa.Column("pinned", sa.Text, nullable=False),  # JSON of the option, or empty
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("updated", sa.Float, nullable=False),
)
_decisions = sa.Table(
    "decisions",
    _metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("created", sa.Float, nullable=False),
    sa.Column("has_plan", sa.Boolean, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),  # zlib of the decision's JSON
)
_since = sa.Table(
    "since",
    _metadata,
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("id", sa.Integer, primary_key=True),  # of the decision that made the plan
    sa.Column("taken", sa.Boolean, nullable=False),  # whether the ranks ever reported under it
    sa.Column("body", sa.Text, nullable=False),  # JSON
)


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run and model as they are on disk.

    Attributes:
        run: Run id.
        model: Model name.
        incarnation: Newest start of the job.
        retired: Earlier ones, newest last.
        frozen: Whether decisions are frozen.
        pinned: Option that an operator pinned; None if none.
        world_size: Ranks of the newest start.
        step: Newest step reported.
        updated: Unix seconds.
    """

    run: str
    model: str
    incarnation: str = ""
    retired: tuple[str, ...] = ()
    frozen: bool = False
    pinned: Option | None = None
    world_size: int = 0
    step: int = 0
    updated: float = 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """All that is known of a run from earlier: ``run`` is None for one never seen.

    Attributes:
        run: The stored run.
        decision: Newest decision.
        plan: Newest plan.
        since: What became of the newest plan that the ranks took, and of a newer one.
    """

    run: StoredRun | None = None
    decision: Decision | None = None
    plan: Plan | None = None
    since: tuple[Since, ...] = ()


class Store:
    """The state file. ``open`` it before use; every method runs in the one thread that owns it.

    Args:
        path: Path of the SQLite file, or ``:memory:``.
        decisions_kept: Decisions kept per run and model; the newest with a plan always is.
    """

    def __init__(self, path: str = MEMORY, decisions_kept: int = 200) -> None:
        self.path = path
        self.term = 0
        self.failure = ""
        """Why the last call failed; empty if it did not. Readiness depends on it."""
        self._kept = decisions_kept
        self._lock_file: int | None = None
        self._engine: sa.Engine | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    async def open(self) -> int:
        """Lock and open the file and start a new term; return it.

        Raises:
            StoreError: Another controller holds the file, or it is no state file.
        """
        try:
            self.term = await self._call(self._open)
        except BaseException:
            await self.close()
            raise
        return self.term

    async def close(self) -> None:
        """Flush, close and unlock. May be called twice."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    async def raise_term(self, above: int) -> int:
        """Make the term larger than ``above`` and return it.

        Needed when an agent holds a plan of a higher term: the state file was lost or is older.
        """

        def work(connection: sa.Connection) -> int:
            return _set_term(connection, max(self.term, above + 1))

        self.term = await self._transaction(work)
        return self.term

    async def load(self, run: str, model: str) -> Memory:
        """Return what is known of a run and model."""

        def work(connection: sa.Connection) -> Memory:
            row = connection.execute(
                sa.select(_runs).where(_runs.c.run == run, _runs.c.model == model)
            ).first()
            newest = _decision(connection, run, model)
            with_plan = _decision(connection, run, model, _decisions.c.has_plan)
            taken = _newest_since(connection, run, model, _since.c.taken)
            newest_plan = _newest_since(connection, run, model)
            return Memory(
                run=_stored(row) if row is not None else None,
                decision=newest,
                plan=with_plan.plan if with_plan is not None else None,
                since=tuple(one for one in (taken, newest_plan) if one is not None),
            )

        return await self._transaction(work)

    async def runs(self, limit: int = 1000) -> tuple[StoredRun, ...]:
        """Return the stored runs, the most recently used first."""

        def work(connection: sa.Connection) -> tuple[StoredRun, ...]:
            query = sa.select(_runs).order_by(_runs.c.updated.desc()).limit(limit)
            return tuple(_stored(row) for row in connection.execute(query))

        return await self._transaction(work)

    async def save_run(self, stored: StoredRun) -> None:
        """Write what is known of a run."""
        values = {
            "run": stored.run,
            "model": stored.model,
            "incarnation": stored.incarnation,
            "retired": json.dumps(stored.retired[-RETIRED_KEPT:]),
            "frozen": stored.frozen,
            "pinned": to_json(stored.pinned) if stored.pinned is not None else "",
            "world_size": stored.world_size,
            "step": stored.step,
            "updated": stored.updated or time.time(),
        }

        def work(connection: sa.Connection) -> None:
            statement = insert(_runs).values(values)
            connection.execute(
                statement.on_conflict_do_update(index_elements=["run", "model"], set_=values)
            )

        await self._transaction(work)

    async def save_decision(self, decision: Decision, since: Sequence[Since] = ()) -> None:
        """Write a decision and forget the oldest beyond the bound.

        Args:
            decision: The decision.
            since: What became of plans, in place of what is stored of them.
        """
        run, model = decision.run, decision.model

        def work(connection: sa.Connection) -> None:
            _write_since(connection, run, model, since)
            connection.execute(
                insert(_decisions).values(
                    run=run,
                    model=model,
                    id=decision.id,
                    created=decision.created,
                    has_plan=decision.plan is not None,
                    body=zlib.compress(to_json(decision).encode(), 1),
                )
            )
            mine = sa.and_(_decisions.c.run == run, _decisions.c.model == model)
            ids = sa.select(_decisions.c.id).where(mine).order_by(_decisions.c.id.desc())
            oldest = connection.scalar(ids.offset(self._kept - 1).limit(1))
            if oldest is None:
                return
            newest_plan = connection.scalar(ids.where(_decisions.c.has_plan).limit(1))
            connection.execute(
                sa.delete(_decisions).where(
                    mine, _decisions.c.id < oldest, _decisions.c.id != (newest_plan or -1)
                )
            )
            left = sa.select(_decisions.c.id).where(mine)
            connection.execute(
                sa.delete(_since).where(
                    _since.c.run == run, _since.c.model == model, _since.c.id.not_in(left)
                )
            )

        await self._transaction(work)

    async def save_since(self, run: str, model: str, since: Sequence[Since]) -> None:
        """Write what became of plans, in place of what is stored of them."""
        await self._transaction(lambda connection: _write_since(connection, run, model, since))

    async def since(self, run: str, model: str, id_: int) -> Since | None:
        """Return what became of the plan in force after a decision; None if that is not known.

        That is the plan of the decision itself, else of the last one that the ranks took.
        """

        def work(connection: sa.Connection) -> Since | None:
            own = _newest_since(connection, run, model, _since.c.id == id_)
            before = (_since.c.id < id_, _since.c.taken)
            return own or _newest_since(connection, run, model, *before)

        return await self._transaction(work)

    async def decision(self, run: str, model: str, id_: int = -1) -> Decision | None:
        """Return a decision, the newest if ``id_`` is negative; None if there is none."""

        def work(connection: sa.Connection) -> Decision | None:
            return _decision(
                connection, run, model, *([_decisions.c.id == id_] if id_ >= 0 else [])
            )

        return await self._transaction(work)

    async def _transaction(self, work: Callable[[sa.Connection], T]) -> T:
        def call() -> T:
            if self._engine is None:
                raise StoreError(f"the state file {self.path} is not open")
            with self._engine.begin() as connection:
                return work(connection)

        return await self._call(call)

    async def _call(self, work: Callable[[], T]) -> T:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except StoreError as error:
            self.failure = str(error)
            raise
        except (sa.exc.SQLAlchemyError, OSError, RuntimeError) as error:
            cause = getattr(error, "orig", None) or error
            self.failure = f"state file {self.path}: {cause}"
            raise StoreError(self.failure) from error
        self.failure = ""
        return result

    def _open(self) -> int:
        if self.path != MEMORY:
            self._lock()
        self._engine = sa.create_engine(
            "sqlite://" if self.path == MEMORY else f"sqlite:///{self.path}",
            poolclass=StaticPool,
            connect_args={"check_same_thread": False},
        )
        with self._engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA journal_mode=WAL")
            connection.exec_driver_sql("PRAGMA synchronous=FULL")
        with self._engine.begin() as connection:
            _metadata.create_all(connection)
            schema = connection.scalar(sa.select(_meta.c.value).where(_meta.c.key == "schema"))
            if schema is None:
                connection.execute(insert(_meta).values(key="schema", value=SCHEMA))
            elif schema != SCHEMA:
                raise StoreError(
                    f"{self.path} has schema {schema}, this version of gradpilot reads {SCHEMA};"
                    " use another file"
                )
            old = connection.scalar(sa.select(_meta.c.value).where(_meta.c.key == "term"))
            return _set_term(connection, (old or 0) + 1)

    def _lock(self) -> None:
        path = Path(os.path.realpath(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise StoreError(
                f"state file {self.path} is in use by another controller (pid {holder});"
                " stop it or set another --state"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock_file = lock

    def _close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
        if self._lock_file is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock_file)  # releases the lock
            self._lock_file = None


def _set_term(connection: sa.Connection, term: int) -> int:
    statement = insert(_meta).values(key="term", value=term)
    connection.execute(
        statement.on_conflict_do_update(index_elements=["key"], set_={"value": term})
    )
    return term


def _decision(
    connection: sa.Connection, run: str, model: str, *conditions: sa.ColumnElement[bool]
) -> Decision | None:
    body = connection.scalar(
        sa.select(_decisions.c.body)
        .where(_decisions.c.run == run, _decisions.c.model == model, *conditions)
        .order_by(_decisions.c.id.desc())
        .limit(1)
    )
    try:
        return from_json(Decision, zlib.decompress(body).decode()) if body is not None else None
    except (ProtocolError, zlib.error) as error:
        # One unreadable row must not keep a whole run out.
        logger.warning("stored decision cannot be read: %s", error, extra={"run": run})
        return None


def _write_since(connection: sa.Connection, run: str, model: str, since: Sequence[Since]) -> None:
    for one in since:
        values = {"taken": one.first_step >= 0, "body": to_json(one)}
        statement = insert(_since).values(run=run, model=model, id=one.id, **values)
        connection.execute(
            statement.on_conflict_do_update(index_elements=["run", "model", "id"], set_=values)
        )


def _newest_since(
    connection: sa.Connection, run: str, model: str, *conditions: sa.ColumnElement[bool]
) -> Since | None:
    body = connection.scalar(
        sa.select(_since.c.body)
        .where(_since.c.run == run, _since.c.model == model, *conditions)
        .order_by(_since.c.id.desc())
        .limit(1)
    )
    try:
        return from_json(Since, body) if body is not None else None
    except ProtocolError as error:
        logger.warning("what became of a plan cannot be read: %s", error, extra={"run": run})
        return None


def _stored(row: sa.Row[Any]) -> StoredRun:
    return StoredRun(
        run=row.run,
        model=row.model,
        incarnation=row.incarnation,
        retired=tuple(json.loads(row.retired)),
        frozen=row.frozen,
        pinned=from_json(Option, row.pinned) if row.pinned else None,
        world_size=row.world_size,
        step=row.step,
        updated=row.updated,
    )

"""What people ask and order, in terms of runs; ``servicer`` puts gRPC around it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from gradpilot.controller import views
from gradpilot.controller.errors import NotFoundError
from gradpilot.controller.planner import Planner
from gradpilot.controller.run import Run
from gradpilot.controller.runs import Runs
from gradpilot.controller.sessions import Outbox, Sessions
from gradpilot.controller.store import Store
from gradpilot.errors import ConfigError
from gradpilot.protos.jsoncodec import to_json
from gradpilot.protos.messages import (
    Decision,
    Done,
    Option,
    PinOrder,
    RunDetail,
    RunRef,
    RunSummary,
)
from gradpilot.protos.validate import validate_pin, validate_ref


class Operators:
    """Answers operators.

    Every method raises ``NotFoundError`` for an unknown run or decision, ``ConfigError`` or
    ``ProtocolError`` for an order that cannot be carried out, and ``StoreError`` if the state file
    fails.
    """

    def __init__(self, runs: Runs, store: Store, sessions: Sessions, planner: Planner) -> None:
        self._runs = runs
        self._store = store
        self._sessions = sessions
        self._planner = planner

    async def list(self) -> tuple[RunSummary, ...]:
        """Return all runs, those with open sessions first."""
        present = {(r.run, r.model): views.summary(r) for r in self._runs}
        for stored in await self._store.runs():
            present.setdefault((stored.run, stored.model), views.stored_summary(stored))
        return tuple(sorted(present.values(), key=lambda s: (not s.ranks, s.run, s.model)))

    async def detail(self, ref: RunRef) -> RunDetail:
        """Return one run."""
        return views.detail(await self._find(ref))

    async def explain(self, ref: RunRef) -> Decision:
        """Return a decision, the newest if negative, with what became of the plan after it."""
        run = await self._find(ref)
        decision = await self._store.decision(run.run, run.model, ref.decision)
        if decision is None:
            which = "no decision yet" if ref.decision < 0 else f"no decision {ref.decision}"
            raise NotFoundError(f"run {run.run!r} model {run.model!r} has {which}")
        run.look()
        since = run.aftermath.find(decision.id)
        if since is None:
            since = await self._store.since(run.run, run.model, decision.id)
            since = run.aftermath.find(since.id) or since if since is not None else None
        return replace(decision, since_json=to_json(since)) if since is not None else decision

    @contextlib.asynccontextmanager
    async def watching(self, ref: RunRef) -> AsyncIterator[Outbox[Decision]]:
        """Fill an outbox with the decisions of a run as they are taken."""
        run = await self._find(ref)
        with self._sessions.watching(run) as outbox:
            yield outbox

    async def pin(self, order: PinOrder) -> Done:
        """Give all buckets one option until unpinned."""
        run = await self._find(RunRef(order.run, order.model))
        validate_pin(replace(order, model=run.model), max(run.world_size, 1))
        _check_carried(run, order.option)
        decision = await self._planner.pin(run, order.option)
        label = order.option.label
        if decision is None:
            return Done(f"pinned {label}; the ranks have it or get it when they connect")
        return Done(f"pinned {label}; plan {decision.id} sent to {run.connected} ranks")

    async def unpin(self, ref: RunRef) -> Done:
        """Let the policy choose again."""
        run = await self._find(ref)
        if run.pinned is None:
            return Done("nothing was pinned")
        label = run.pinned.label
        await self._planner.unpin(run)
        return Done(f"unpinned {label}; the policy chooses again")

    async def freeze(self, ref: RunRef) -> Done:
        """Keep the present plan."""
        await self._planner.freeze(await self._find(ref))
        return Done("frozen; the present plan stays until resumed")

    async def resume(self, ref: RunRef) -> Done:
        """Take decisions again."""
        await self._planner.resume(await self._find(ref))
        return Done("resumed; decisions are taken again")

    async def _find(self, ref: RunRef) -> Run:
        validate_ref(ref)
        if ref.model and (run := self._runs.get(ref.run, ref.model)) is not None:
            return run
        stored = await self._store.runs()
        models = {s.model for s in stored if s.run == ref.run} | set(self._runs.models(ref.run))
        if not models:
            known = sorted({r.run for r in self._runs} | {s.run for s in stored})
            some = ", ".join(map(repr, known[:10])) or "none yet"
            raise NotFoundError(f"no run {ref.run!r}; known: {some}")
        if not ref.model and len(models) > 1:
            names = ", ".join(sorted(models))
            raise ConfigError(f"run {ref.run!r} has several models, name one of: {names}")
        model = ref.model or next(iter(models))
        if model not in models:
            names = ", ".join(sorted(models))
            raise NotFoundError(f"run {ref.run!r} has no model {model!r}; known: {names}")
        return await self._sessions.load(ref.run, model)


def _check_carried(run: Run, option: Option) -> None:
    """Check an option against what the agents say that they can do, if they have said it."""
    # An agent that does not list its abilities can do at least what it offers to policies.
    can = run.abilities or run.families
    if not can:
        return
    carriers = [a.collectives for a in can if a.compressor == option.compressor]
    if not carriers:
        known = ", ".join(sorted({a.compressor for a in can}))
        raise ConfigError(f"the ranks have no compressor {option.compressor!r}; known: {known}")
    collectives = sorted({name for names in carriers for name in names})
    if option.collective not in collectives:
        raise ConfigError(
            f"{option.compressor} can be carried by {', '.join(collectives)},"
            f" got {option.collective!r}"
        )

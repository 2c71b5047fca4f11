"""Decides when there is something to decide, numbers and stores it, and sends it out.

One task looks at all runs; a decision is taken when a run has news (``Run.news``), is neither
frozen nor pinned, and its last one is old enough. Whatever goes wrong, the ranks keep their plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from gradpilot.controller.aftermath import Aftermath
from gradpilot.controller.config import ControllerConfig
from gradpilot.controller.errors import StoreError
from gradpilot.controller.plans import decision_interval, plan_label
from gradpilot.controller.probing import patience
from gradpilot.controller.run import Run
from gradpilot.controller.runs import Runs
from gradpilot.controller.sessions import Sessions
from gradpilot.controller.solver import Solver
from gradpilot.controller.store import Store
from gradpilot.controller.totals import OUTCOMES
from gradpilot.controller.views import to_store
from gradpilot.errors import ConfigError, GradpilotError
from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.guards import settle
from gradpilot.protos.explanations import Since
from gradpilot.protos.jsoncodec import to_json
from gradpilot.protos.messages import (
    Assignment,
    Decision,
    Layout,
    Option,
    Plan,
    ProbeRequest,
    check_option,
)
from gradpilot.protos.validate import validate_probe_request

logger = logging.getLogger(__name__)

PINNED = "pinned"
"""Policy name of plans that an operator ordered."""

SILENT_WINDOWS = 3.0
"""A rank silent for this many report times is not waited for."""

MAX_SETBACKS = 6
"""Setbacks that still double the wait for the next decision."""

IDLE_SECONDS = 0.5
"""Longest time between two looks at runs that wait for a time to come."""

SPACING_SECONDS = 0.02
"""Least time between two looks, so that many reports cost one look."""

_LEVELS = {"error": logging.WARNING, "keep": logging.DEBUG}
"""Log level by outcome; most decisions keep the plan and are told by metrics."""


class Planner:
    """Takes all decisions.

    Args:
        config: Settings.
        runs: All runs.
        store: The state file.
        sessions: Open sessions; the planner listens to them.
        solver: Where policies run.
    """

    def __init__(
        self,
        config: ControllerConfig,
        runs: Runs,
        store: Store,
        sessions: Sessions,
        solver: Solver,
    ) -> None:
        self._config = config
        self._settings = config.policy_settings.settings()
        self._runs = runs
        self._store = store
        self._sessions = sessions
        self._solver = solver
        self._waiting: set[Run] = set()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        sessions.on_news = self.look
        sessions.on_layout = self._on_layout

    def look(self, run: Run) -> None:
        """Look at a run soon: something changed."""
        self._waiting.add(run)
        self._wake.set()

    async def serve(self) -> None:
        """Take decisions until cancelled."""
        while True:
            try:
                await self._round()
            except Exception:  # nothing a run contains may stop the decisions of the others
                logger.exception("planner failed")
            await asyncio.sleep(SPACING_SECONDS)
            # Not wait_for: before Python 3.12 it can swallow the cancellation that ends this task.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    await self._wake.wait()
            self._wake.clear()

    async def pin(self, run: Run, option: Option) -> Decision | None:
        """Give all buckets one option until unpinned; None if the ranks need no new plan now.

        Raises:
            StoreError: It could not be stored.
        """
        async with run.lock:
            await self._store.save_run(replace(to_store(run), pinned=option))
            run.pinned = option
            run.changes += 1
            return await self._apply_pin(run)

    async def unpin(self, run: Run) -> None:
        """Let the policy choose again, at once if the ranks have reported."""
        async with run.lock:
            await self._store.save_run(replace(to_store(run), pinned=None))
            run.pinned = None
        self._ask(run, "unpinned by an operator")

    async def freeze(self, run: Run) -> None:
        """Keep the plan; take no decisions."""
        async with run.lock:
            await self._store.save_run(replace(to_store(run), frozen=True))
            run.frozen = True
            run.changes += 1

    async def resume(self, run: Run) -> None:
        """Take decisions again."""
        async with run.lock:
            await self._store.save_run(replace(to_store(run), frozen=False))
            run.frozen = False
        self._ask(run, "resumed by an operator")

    # --- when ------------------------------------------------------------------------------------

    async def _round(self) -> None:
        for run in self._runs.expire(time.monotonic()):
            self._waiting.discard(run)
            await self._store.save_run(to_store(run))
            await self._store.save_since(run.run, run.model, run.aftermath.records())
            logger.info("run forgotten", extra={"run": run.run, "model": run.model})
        for run in tuple(self._waiting):
            if run.connected == 0 or run.frozen or run.pinned is not None:
                self._waiting.discard(run)  # whatever changes that makes us look again
            elif why := self._due(run, time.monotonic()):
                self._waiting.discard(run)
                await self._decide(run, why)

    def _due(self, run: Run, now: float) -> str:
        wait = self._config.min_decision_seconds * 2 ** min(run.setbacks, MAX_SETBACKS)
        # The decision that asked for a probe was none, so the one that has it need not wait.
        answered = run.probes.answered and not run.setbacks
        if now - run.decided_at < wait and not answered:
            return ""
        return run.news(now, SILENT_WINDOWS * self._config.report_seconds)

    def _ask(self, run: Run, why: str) -> None:
        run.ask(why)
        self.look(run)

    def _on_layout(self, run: Run) -> None:
        self.look(run)
        if run.pinned is not None:
            task = asyncio.create_task(self._pin_again(run))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # --- what ------------------------------------------------------------------------------------

    async def _decide(self, run: Run, why: str) -> None:
        now = time.monotonic()
        inputs = run.inputs(
            self._settings, now, self._config.seed, SILENT_WINDOWS * self._config.report_seconds
        )
        changes, run.decided_at, run.probes.answered = run.changes, now, False
        outcome, text = Outcome("error", ""), ""
        try:
            outcome, text = await self._solver.decide(self._config.policy, inputs)
            options = _checked(outcome, inputs)
            asked, outcome = outcome, settle(outcome, inputs)
            run.probes.repeats += outcome is not asked
        except GradpilotError as error:
            outcome, options = Outcome("error", str(error)), ()
        seconds = time.monotonic() - now
        async with run.lock:
            if run.changes != changes:
                logger.info("decision dropped, the run changed meanwhile", extra=_where(run))
                self.look(run)
                return
            decision = Decision(
                run=run.run,
                model=run.model,
                term=self._store.term,
                id=run.plans.next_id,
                step=inputs.step,
                created=time.time(),
                policy=self._config.policy,
                outcome=outcome.outcome,
                reason=outcome.reason,
                link=outcome.link,
                current=outcome.current,
                chosen=outcome.chosen,
                front=outcome.front,
                seconds=seconds,
                plan=self._plan(
                    run,
                    inputs.layout,
                    options,
                    self._config.policy,
                    outcome.reason,
                    outcome.chosen.step_seconds if outcome.chosen else inputs.step_seconds,
                )
                if options
                else None,
                inputs_json=text,
                explanation_json=to_json(outcome.explanation) if outcome.explanation else "",
            )
            try:
                await self._commit(run, decision, why, outcome.undone)
            except StoreError as error:
                run.setbacks += 1
                logger.error("decision not stored, so not sent: %s", error, extra=_where(run))
                return
            run.learn(outcome)
            if outcome.outcome == "probe":
                self._ask_for_probe(run, decision.id, inputs, outcome.probe_bytes)

    def _ask_for_probe(self, run: Run, id_: int, inputs: Inputs, sizes: tuple[int, ...]) -> None:
        """Ask all ranks; the caller has checked that none is under way."""
        plan = inputs.current
        interval = plan.interval if plan is not None else self._settings.interval
        wait = patience(self._config.report_seconds, interval, inputs.step_seconds)
        ranks = [rank for rank, member in run.members.items() if member.connected]
        run.probes.ask(id_, run.step, ranks, time.monotonic() + wait)
        self._sessions.send(run, ProbeRequest(id_, *sizes))

    async def _pin_again(self, run: Run) -> None:
        async with run.lock:
            try:
                await self._apply_pin(run)
            except StoreError as error:
                logger.error("pinned plan not stored, so not sent: %s", error, extra=_where(run))

    async def _apply_pin(self, run: Run) -> Decision | None:
        """Send the pinned plan unless the ranks have it; the caller holds the run's lock."""
        option, layout = run.pinned, run.layout
        if option is None or layout is None:
            return None
        newest = run.plans.newest
        if newest is not None and newest.policy == PINNED and newest.options() == (option,):
            return None
        reason = f"pinned to {option.label} by an operator"
        decision = Decision(
            run=run.run,
            model=run.model,
            term=self._store.term,
            id=run.plans.next_id,
            step=run.step,
            created=time.time(),
            policy=PINNED,
            outcome="pinned",
            reason=reason,
            link=run.link,
            plan=self._plan(
                run,
                layout,
                (option,) * len(layout.buckets),
                PINNED,
                reason,
                measured.step_seconds if (measured := run.measured()) else 0.0,
            ),
        )
        await self._commit(run, decision, reason)
        return decision

    def _plan(
        self,
        run: Run,
        layout: Layout,
        options: Sequence[Option],
        policy: str,
        reason: str,
        step_seconds: float,
    ) -> Plan:
        buckets = zip(layout.buckets, options, strict=True)
        return Plan(
            term=self._store.term,
            id=run.plans.next_id,
            layout=layout.digest,
            assignments=tuple(Assignment(b.fingerprint, o) for b, o in buckets),
            interval=decision_interval(self._settings, step_seconds),
            policy=policy,
            reason=reason,
        )

    async def _commit(self, run: Run, decision: Decision, why: str, undone: str = "") -> None:
        """Store, then publish: what an agent may have seen is on disk."""
        since = _begin(run, decision, undone) if decision.plan is not None else None
        records = run.aftermath.records()
        await self._store.save_decision(decision, records if since is None else (*records, since))
        run.aftermath.stored()
        if since is not None:
            run.aftermath.sent(since)
        run.record(decision, time.monotonic())
        if decision.plan is not None and run.plans.newest is decision.plan:
            self._sessions.send(run, decision.plan)
        self._sessions.publish(run, decision)
        logger.log(
            _LEVELS.get(decision.outcome, logging.INFO),
            "decision: %s",
            decision.outcome,
            extra={
                **_where(run),
                "decision": decision.id,
                "why": why,
                "reason": decision.reason,
                "seconds": round(decision.seconds, 4),
            },
        )


def _begin(run: Run, decision: Decision, undone: str) -> Since:
    before, start, measured = run.in_force(), run.start(), run.look()
    label = plan_label(before) if before is not None else start.label if start is not None else ""
    seconds = measured.step_seconds if measured is not None else 0.0
    return Aftermath.begin(decision, label, seconds, undone)


def _checked(outcome: Outcome, inputs: Inputs) -> tuple[Option, ...]:
    """Return the options to switch to; empty if nothing is switched.

    Raises:
        ConfigError: The policy answered something that cannot be carried out.
        ProtocolError: It asks for an impossible probe.
    """
    if outcome.outcome not in OUTCOMES:
        raise ConfigError(f"policy answered {outcome.outcome!r}, known: {', '.join(OUTCOMES)}")
    if outcome.outcome == "probe":
        if len(outcome.probe_bytes) != 2:
            raise ConfigError(f"a probe needs two sizes, got {outcome.probe_bytes}")
        validate_probe_request(ProbeRequest(0, *outcome.probe_bytes))
    if outcome.outcome != "switch":
        return ()
    if len(outcome.options) != len(inputs.layout.buckets):
        raise ConfigError(
            f"policy gave {len(outcome.options)} options for {len(inputs.layout.buckets)} buckets"
        )
    for option in outcome.options:
        check_option(option, inputs.world_size)
    return outcome.options


def _where(run: Run) -> dict[str, object]:
    return {"run": run.run, "model": run.model}

"""State of one run: who is there, what it can do, what it measured, which plan it holds.

No I/O and no waiting here; the event loop is the only caller. ``now`` is monotonic seconds. Memory
is bounded by ranks x buckets and by the deques' lengths, never by time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from dataclasses import replace

from gradpilot.controller.aftermath import Aftermath
from gradpilot.controller.errors import NotFoundError, RefusedError
from gradpilot.controller.joining import OperationJoiner
from gradpilot.controller.layouts import PastLayouts, may_open
from gradpilot.controller.member import Member
from gradpilot.controller.plans import PlanBook
from gradpilot.controller.probing import ProbeWatch
from gradpilot.controller.store import RETIRED_KEPT, Memory, StoredRun
from gradpilot.controller.totals import DecisionStats, PredictionStats, Totals
from gradpilot.controller.window import (
    ComputeTable,
    Measured,
    bucket_states,
    measured,
    merge_buckets,
)
from gradpilot.errors import ProtocolError
from gradpilot.policies.base import Inputs, Outcome, PolicySettings
from gradpilot.policies.history import History, stored_history
from gradpilot.protos.messages import (
    Ability,
    Ack,
    BucketReport,
    Catalog,
    Decision,
    Family,
    Hello,
    Layout,
    LinkEstimate,
    Option,
    Plan,
    Report,
)
from gradpilot.protos.validate import validate_report

logger = logging.getLogger(__name__)

REFUSALS = ("invalid", "layout", "sequence", "catalog", "session", "too_large")
"""Why something an agent sent was refused."""


class Run:
    """One model of one run.

    Args:
        run: Run id.
        model: Model name.
        memory: What the store knows of it.
        now: Monotonic seconds.
    """

    def __init__(self, run: str, model: str, memory: Memory, now: float) -> None:
        stored = memory.run or StoredRun(run, model)
        self.run, self.model = run, model
        self.incarnation = stored.incarnation
        self.retired: deque[str] = deque(stored.retired, maxlen=RETIRED_KEPT)
        self.world_size = stored.world_size
        self.members: dict[int, Member] = {}
        self.layout: Layout | None = None
        self.families: tuple[Family, ...] = ()
        self.abilities: tuple[Ability, ...] = ()
        self.compute = ComputeTable()
        self.operations = OperationJoiner()
        self.totals = Totals()
        self.decisions = DecisionStats()
        self.predictions = PredictionStats()
        self.refused: Counter[str] = Counter()
        self.reports_taken = 0
        self.step = stored.step
        self.frozen = stored.frozen
        self.pinned = stored.pinned
        self.decision: Decision | None = None
        """Newest decision, without its inputs: those are large, and the store has them."""
        self.link: LinkEstimate | None = None
        self.link_at = now
        self.history = History()
        """What the policy's decisions learned."""
        self.aftermath = Aftermath(memory.since)
        self.probes = ProbeWatch()
        self.predicted_step_seconds = math.nan
        self.plans = PlanBook()
        self.changes = 0
        """Grows whenever a decision under way no longer fits."""
        self.decided_at = -math.inf
        """When the last decision began."""
        self.setbacks = 0
        """Failed decisions and rejected plans in a row; each doubles the wait for the next."""
        self.updated = stored.updated
        self.ended_at: float | None = now
        """When the last session ended; None while one is open."""
        self.lock = asyncio.Lock()
        """Held while a decision is numbered, stored and published."""
        self._past_layouts = PastLayouts()
        self._fresh_since: float | None = None
        self._switch_step = self.step
        self._force_key: tuple[int, int] | None = None
        self._force_decision = ""
        if memory.decision is not None:
            self.decision = replace(memory.decision, inputs_json="")
            self.link = memory.decision.link
            self.history = stored_history(memory.decision.inputs_json)
            self.link_at -= max(time.time() - memory.decision.created, 0.0)
            self.plans.number(memory.decision.id)
        if memory.plan is not None:
            self.plans.remember(memory.plan)

    # --- members ---------------------------------------------------------------------------------

    def join(self, hello: Hello, now: float) -> Member:
        """A rank is there.

        Raises:
            RefusedError: It belongs to an earlier start of the job, or to a group of another size.
        """
        if hello.incarnation in self.retired:
            raise RefusedError(
                f"incarnation {hello.incarnation!r} of run {self.run!r} was replaced by"
                f" {self.incarnation!r}; this process belongs to an earlier start of the job",
                "session",
            )
        if hello.incarnation != self.incarnation:
            self._restart(hello)
        elif hello.world_size != self.world_size:
            raise RefusedError(
                f"run {self.run!r} model {self.model!r} has {self.world_size} ranks,"
                f" rank {hello.rank} says {hello.world_size}",
                "session",
            )
        member = self.members.get(hello.rank)
        if member is None:
            member = self.members[hello.rank] = Member(hello)
            self.totals.start(hello.rank, from_zero=hello.step == 0)
        member.hello = hello
        member.connected = True
        member.sequence = -1
        self.probes.clear()  # what the rank was asked went to an earlier session
        self.ended_at = None
        self.step = max(self.step, hello.step)
        if hello.plan is not None and hello.plan.id:  # 0: what it started with
            self.plans.remember(hello.plan)
        self.touch()
        return member

    def leave(self, rank: int, now: float) -> None:
        """The rank's session ended."""
        self.members[rank].connected = False
        self.members[rank].fresh = False
        if not self.connected:
            self.ended_at = now
        self.touch()

    @property
    def connected(self) -> int:
        """Return the number of ranks with an open session."""
        return sum(m.connected for m in self.members.values())

    @property
    def state(self) -> str:
        """Return the state for people: ``ended``, ``starting``, ``incomplete`` or ``running``."""
        if not self.connected:
            return "ended"
        if self.layout is None:
            return "starting"
        return "running" if self.connected == self.world_size else "incomplete"

    def set_catalog(self, rank: int, catalog: Catalog) -> bool:
        """Take what a rank can do; return whether the run's layout changed by it.

        Raises:
            RefusedError: Its layout is neither the run's nor a change that may come now.
        """
        member = self.members[rank]
        digest = catalog.layout.digest
        current = self.layout.digest if self.layout else ""
        changed = digest != current
        if changed and self._past_layouts.is_behind(self.members, rank, digest, current):
            member.layout = digest
            return False
        known = self.layout is not None
        if changed and known and not may_open(self.members, rank, current, self.world_size):
            member.layout = ""  # which it left: the last one to leave may open the new one
            raise RefusedError(
                f"rank {rank} has layout {digest}, the other ranks of run {self.run!r} model"
                f" {self.model!r} have {current}; all ranks must wrap the same model with the same"
                " DDP settings",
                "catalog",
            )
        if digest != member.layout:
            member.reports.clear()
            member.buckets = ()
            member.fresh = False
        member.layout = digest
        member.calibration = catalog.calibration
        if changed:
            self._change_layout(catalog)
        self.compute.calibrate(m.calibration for m in self.members.values() if m.layout == digest)
        self.touch()
        return changed

    def add_report(self, rank: int, report: Report, now: float) -> str:
        """Take one window of one rank.

        Returns:
            Why it was refused, one of ``REFUSALS``; empty if it was taken.

        Raises:
            ProtocolError: It cannot be true; counted, and nothing of it is used.
        """
        member = self.members[rank]
        if self.layout is None or {report.layout, member.layout} != {self.layout.digest}:
            return self.refuse("layout")
        try:
            validate_report(report, self.layout, self.world_size)
        except ProtocolError:
            self.refuse("invalid")
            raise
        if report.sequence <= member.sequence:
            return self.refuse("sequence")
        key = (report.plan_term, report.plan_id)
        last = member.reports[-1] if member.reports else None
        same_plan = last is not None and (last.plan_term, last.plan_id) == key
        member.sequence = report.sequence
        member.reports.append(report)
        member.buckets = merge_buckets(member.buckets, report.buckets, same_plan=same_plan)
        self.plans.number(report.plan_id)
        self.step = max(self.step, report.last_step)
        self.totals.add(rank, report.counters)
        self.operations.add(rank, report.samples, now, self.world_size)
        self.probes.take(rank, report.samples)
        self.reports_taken += 1
        if self._force_key != key and self.in_force_key() == key:
            self._force_key = key
            self._switch_step = report.first_step
            self.setbacks = 0
        if self.plans.usable(key, now, report.step_seconds):
            member.fresh = True
            if self._fresh_since is None:
                self._fresh_since = now
        self.touch()
        return ""

    def refuse(self, reason: str) -> str:
        """Count a refusal."""
        self.refused[reason] += 1
        return reason

    def acknowledge(self, rank: int, ack: Ack) -> bool:
        """Take what became of a plan on a rank; return whether the newest plan is void by it."""
        self.touch()
        if ack.state != "rejected" or not self.plans.void((ack.term, ack.id), self.in_force()):
            return False
        self.changes += 1
        self.setbacks += 1
        return True

    # --- decisions -------------------------------------------------------------------------------

    def in_force_key(self) -> tuple[int, int] | None:
        """Return the key that most ranks' newest windows carry; None before the first window."""
        keys = Counter(
            (m.reports[-1].plan_term, m.reports[-1].plan_id)
            for m in self.members.values()
            if m.reports and m.connected
        )
        return keys.most_common(1)[0][0] if keys else None

    def in_force(self) -> Plan | None:
        """Return the plan that the ranks carry out; None before the first."""
        return self.plans.get(self.in_force_key())

    def start(self) -> Option | None:
        """Return the option of all buckets before the first plan; None if no rank said."""
        plans = (m.hello.plan for m in self.members.values() if m.connected)
        return next((p.default for p in plans if p is not None and not p.id), None)

    def news(self, now: float, window_seconds: float) -> str:
        """Return why a decision is due; empty if it is not.

        Args:
            now: Monotonic seconds.
            window_seconds: A rank that is silent for longer is not waited for.
        """
        if self.layout is None or not self.connected:
            return ""
        if self._force_decision and any(m.reports for m in self.members.values()):
            return self._force_decision
        fresh = sum(m.fresh for m in self.members.values())
        if fresh == self.world_size:
            return "new window of all ranks"
        waited = self._fresh_since is not None and now - self._fresh_since >= window_seconds
        if waited and 2 * fresh >= self.world_size:
            return f"new window of {fresh} of {self.world_size} ranks"
        return ""

    def ask(self, why: str) -> None:
        """A decision is due whether or not a new window came."""
        self._force_decision = why
        self.changes += 1

    def inputs(
        self, settings: PolicySettings, now: float, seed: int = 0, window_seconds: float = 0.0
    ) -> Inputs:
        """Return what a policy decides from, and start to wait for the next window."""
        if self.layout is None:
            raise NotFoundError(f"run {self.run!r} model {self.model!r} has no layout yet")
        self.operations.close(now, window_seconds, max(self.connected, 1))
        current = self.in_force()
        _, buckets = self._under_current()
        if current is not None and any(m.fresh for m in self.members.values()):
            self.compute.refine(self.layout, current, buckets)
        for member in self.members.values():
            member.fresh = False
        self._fresh_since = None
        self._force_decision = ""
        now_measured = self.look()
        slowest, behind = self.operations.slowest()
        backends = Counter(m.hello.backend for m in self.members.values() if m.hello.backend)
        return Inputs(
            run=self.run,
            model=self.model,
            world_size=self.world_size,
            step=self.step,
            seed=seed,
            layout=self.layout,
            families=self.families,
            compute=self.compute.samples(),
            operations=self.operations.recent(now),
            buckets=bucket_states(self.layout, buckets),
            compute_seconds=now_measured.compute_seconds if now_measured else 0.0,
            step_seconds=now_measured.step_seconds if now_measured else 0.0,
            straggle_seconds=self.operations.straggle(self._switch_step),
            current=current,
            start=self.start(),
            steps_since_switch=max(self.step - self._switch_step, 0),
            link=self._aged_link(now),
            history=self.history,
            probing=self.probes.pending(now),
            backend=backends.most_common(1)[0][0] if backends else "gloo",
            sequential=any(m.hello.emulated for m in self.members.values()),
            loss=now_measured.loss if now_measured else math.nan,
            lr=now_measured.lr if now_measured else math.nan,
            nonfinite_steps=self.totals["nonfinite_steps"] if self.reports_taken else -1,
            slowest_rank=slowest,
            slowest_seconds=behind,
            settings=settings,
        )

    def record(self, decision: Decision, now: float) -> None:
        """A decision was taken and stored; of its plan ``aftermath`` knows already."""
        self.decision = replace(decision, inputs_json="")
        self.decisions.add(decision.outcome, decision.seconds)
        self.plans.number(decision.id)
        if decision.outcome == "error":
            self.setbacks += 1
        elif decision.plan is None:
            self.setbacks = 0
        if decision.link is not None:
            self.link, self.link_at = decision.link, now
        if decision.plan is not None and self.plans.sent(decision.plan, now):
            for member in self.members.values():
                member.fresh = False
        if decision.outcome in ("switch", "keep", "pinned"):
            predicted = decision.chosen if decision.plan is not None else decision.current
            self.predicted_step_seconds = predicted.step_seconds if predicted else math.nan
        self.touch()

    def learn(self, outcome: Outcome) -> None:
        """Keep what a decision learned; count what it undid and how predictions turned out."""
        known, self.history = self.history, outcome.history or self.history
        self.predictions.take(known.errors, self.history.errors)
        self.decisions.undone.update([outcome.undone] if outcome.undone else [])

    def look(self) -> Measured | None:
        """Return what a step costs now, and note it with the plan in force."""
        now, key = self.measured(), self.in_force_key()
        if now is not None and key is not None:
            self.aftermath.look(key[1], self._switch_step, self.step, now.step_seconds, now.gain)
        return now

    def measured(self) -> Measured | None:
        """Return what a step costs now; None before the first window."""
        if self.layout is None:
            return None
        windows, buckets = self._under_current()
        return measured(self.layout, windows, buckets)

    def touch(self) -> None:
        """Something was heard of the run."""
        self.updated = time.time()

    def link_age(self, now: float) -> float:
        """Return the seconds since the newest operation that the link estimate used."""
        return self.link.age_seconds + now - self.link_at if self.link is not None else 0.0

    # --- inside ----------------------------------------------------------------------------------

    def _aged_link(self, now: float) -> LinkEstimate | None:
        return replace(self.link, age_seconds=self.link_age(now)) if self.link else None

    def _restart(self, hello: Hello) -> None:
        if self.incarnation:
            self.retired.append(self.incarnation)
        if self.world_size not in (0, hello.world_size):
            self.plans.clear()  # skips and costs belong to the world size
        self.incarnation, self.world_size = hello.incarnation, hello.world_size
        self.members.clear()
        self.aftermath.clear()
        self.layout, self.families, self.abilities = None, (), ()
        self.plans.use_layout("")
        self.operations.clear()
        self.probes.clear()
        self.history = History()
        self._past_layouts.clear()
        self._force_key, self._fresh_since, self._force_decision = None, None, ""
        self.step = self._switch_step = hello.step
        self.changes += 1

    def _change_layout(self, catalog: Catalog) -> None:
        if self.layout is not None:
            self._past_layouts.add(self.layout.digest)
        self.layout, self.families = catalog.layout, catalog.families
        self.abilities = catalog.abilities
        self.probes.clear()
        self.plans.use_layout(catalog.layout.digest)
        self._force_key, self._fresh_since, self._force_decision = None, None, ""
        self._switch_step = self.step
        self.changes += 1

    def _under_current(self) -> tuple[list[list[Report]], list[tuple[BucketReport, ...]]]:
        key = self.in_force_key()
        if key is None:
            return [], []
        members = [m for m in self.members.values() if m.under(key) and m.connected]
        return [m.under(key) for m in members], [m.buckets for m in members]

"""Runs as operators see them, and as they are stored."""

from __future__ import annotations

from gradpilot.controller.plans import plan_label
from gradpilot.controller.run import Run
from gradpilot.controller.store import StoredRun
from gradpilot.protos.messages import RunDetail, RunSummary


def summary(run: Run) -> RunSummary:
    """Return a run as it is listed."""
    plan = run.in_force() or run.plans.newest
    measured = run.measured()
    return RunSummary(
        run=run.run,
        model=run.model,
        state=run.state,
        ranks=run.connected,
        world_size=run.world_size,
        step=run.step,
        plan_id=plan.id if plan else 0,
        plan_label=plan_label(plan) if plan else "",
        step_seconds=measured.step_seconds if measured else 0.0,
        frozen=run.frozen,
        pinned=run.pinned.label if run.pinned else "",
        updated=run.updated,
    )


def to_store(run: Run) -> StoredRun:
    """Return what of a run must survive a restart."""
    return StoredRun(
        run=run.run,
        model=run.model,
        incarnation=run.incarnation,
        retired=tuple(run.retired),
        frozen=run.frozen,
        pinned=run.pinned,
        world_size=run.world_size,
        step=run.step,
        updated=run.updated,
    )


def stored_summary(stored: StoredRun) -> RunSummary:
    """Return a run that is on disk only as it is listed."""
    return RunSummary(
        run=stored.run,
        model=stored.model,
        state="ended",
        ranks=0,
        world_size=stored.world_size,
        step=stored.step,
        plan_id=0,
        plan_label="",
        step_seconds=0.0,
        frozen=stored.frozen,
        pinned=stored.pinned.label if stored.pinned else "",
        updated=stored.updated,
    )


def detail(run: Run) -> RunDetail:
    """Return a run with its members, newest plan and newest decision."""
    members = (m.hello for m in run.members.values() if m.connected)
    return RunDetail(
        summary=summary(run),
        members=tuple(sorted(members, key=lambda hello: hello.rank)),
        layout=run.layout,
        plan=run.plans.newest,
        decision=run.decision,
    )

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from gradpilot.controller.errors import CapacityError, NotFoundError, RefusedError
from gradpilot.controller.member import RECENT_REPORTS
from gradpilot.controller.run import Run
from gradpilot.controller.runs import Runs
from gradpilot.controller.store import Memory, StoredRun
from gradpilot.controller.views import summary, to_store
from gradpilot.errors import ProtocolError
from gradpilot.policies.base import POLICIES, Inputs, Outcome, PolicySettings
from gradpilot.policies.history import GainRecord, History
from gradpilot.protos.explanations import Since
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import (
    BF16,
    DENSE,
    Ack,
    Counters,
    Decision,
    LinkEstimate,
    Option,
    Plan,
)
from tests.controller import fakes
from tests.controller.fakes import catalog, hello, layout, report

OLD, NEW = layout(), layout(2, name="rebuilt")


def complete(world_size: int = 4, memory: Memory | None = None) -> Run:
    run = Run("run", "model", memory or Memory(), 0.0)
    for rank in range(world_size):
        run.join(hello(rank, world_size), 0.0)
        run.set_catalog(rank, catalog(OLD))
    return run


def windows(run: Run, now: float = 1.0, plan: Plan | None = None, sequence: int = 1) -> None:
    for rank in run.members:
        of = run.layout or OLD
        window = report(of, rank, sequence, plan, run.world_size)
        assert run.add_report(rank, window, now) == ""


# --- layouts -------------------------------------------------------------------------------------


def test_a_rebuild_moves_all_ranks_one_after_another() -> None:
    run = complete()
    windows(run)
    assert run.set_catalog(2, catalog(NEW))
    assert run.layout == NEW
    assert run.add_report(0, report(OLD, 0, 2), 2.0) == "layout"  # late
    for rank in (0, 1):
        assert not run.set_catalog(rank, catalog(NEW))
    run.join(hello(3), 3.0)  # connects again before it has rebuilt
    assert not run.set_catalog(3, catalog(OLD))
    assert run.add_report(3, report(OLD, 3, 2), 3.0) == "layout"
    assert run.add_report(3, report(NEW, 3, 3), 3.0) == "layout"
    assert not run.set_catalog(3, catalog(NEW))
    windows(run, 4.0, sequence=4)
    assert run.news(4.0, 10.0)
    assert run.refused == {"layout": 3}


def test_a_rank_alone_in_another_layout_is_refused() -> None:
    run = Run("run", "model", Memory(), 0.0)
    for rank in range(2):
        run.join(hello(rank, 2), 0.0)
    run.set_catalog(0, catalog(OLD))
    with pytest.raises(RefusedError, match=f"{NEW.digest}.*{OLD.digest}"):
        run.set_catalog(1, catalog(NEW))
    assert run.layout == OLD
    run.set_catalog(1, catalog(OLD))
    third = layout(3, name="third")
    assert run.set_catalog(0, catalog(NEW))
    with pytest.raises(RefusedError, match=third.digest):
        run.set_catalog(1, catalog(third))


def test_ranks_that_rebuild_before_the_last_one_comes_are_taken_in_the_end() -> None:
    run = Run("run", "model", Memory(), 0.0)
    for rank in range(2):
        run.join(hello(rank, 3), 0.0)
        run.set_catalog(rank, catalog(OLD))
    run.join(hello(2, 3), 0.0)
    for rank in (2, 0):  # all have rebuilt meanwhile
        with pytest.raises(RefusedError, match=f"{NEW.digest}.*{OLD.digest}"):
            run.set_catalog(rank, catalog(NEW))
    assert run.set_catalog(1, catalog(NEW)), "nobody else holds the old one any more"
    for rank in (2, 0):  # they try again
        assert not run.set_catalog(rank, catalog(NEW))
    assert run.layout == NEW


def test_all_ranks_may_return_to_an_earlier_layout() -> None:
    run = complete(2)
    for sequence, of in enumerate((NEW, OLD, NEW), 1):
        for rank in range(2):
            run.set_catalog(rank, catalog(of))
        assert run.layout == of
        windows(run, sequence=sequence)


# --- incarnations --------------------------------------------------------------------------------


def test_a_restart_of_the_job_forgets_members_but_not_numbers() -> None:
    run = complete()
    windows(run)
    plan = Plan(1, run.plans.next_id, OLD.digest)
    run.record(decision(plan), 2.0)
    run.join(hello(0, incarnation="second"), 3.0)
    assert list(run.members) == [0]
    assert run.layout is None
    assert run.plans.newest is None
    run.set_catalog(0, catalog(OLD))
    assert run.plans.newest == plan  # same world size, same layout
    with pytest.raises(RefusedError, match=r"'first'.*'second'"):
        run.join(hello(1, incarnation="first"), 3.0)
    run.join(hello(0, 8, incarnation="third"), 4.0)
    run.set_catalog(0, catalog(OLD))
    assert run.plans.newest is None  # another world size
    assert run.plans.next_id == plan.id + 1
    assert list(to_store(run).retired) == ["first", "second"]


def test_a_rank_with_another_world_size_is_refused() -> None:
    run = complete()
    with pytest.raises(RefusedError, match="4 ranks, rank 1 says 8"):
        run.join(hello(1, 8), 0.0)


# --- windows -------------------------------------------------------------------------------------


def test_news_is_a_window_of_all_ranks_and_is_used_once() -> None:
    run = complete()
    assert run.news(0.0, 10.0) == ""
    for rank in range(4):
        assert run.news(1.0, 10.0) == ""
        run.add_report(rank, report(OLD, rank), 1.0)
    assert run.news(1.0, 10.0) == "new window of all ranks"
    run.inputs(PolicySettings(), 1.0)
    assert run.news(1.0, 10.0) == ""


def test_a_silent_rank_is_waited_for_no_longer_than_the_window() -> None:
    run = complete()
    for rank in range(2):
        run.add_report(rank, report(OLD, rank), 1.0)
    assert run.news(10.9, 10.0) == ""
    assert run.news(11.0, 10.0) == "new window of 2 of 4 ranks"
    alone = complete()
    alone.add_report(0, report(OLD, 0), 1.0)
    assert alone.news(99.0, 10.0) == ""  # fewer than half


def test_an_operator_may_ask_once_there_are_windows() -> None:
    run = complete()
    run.ask("unpinned")
    assert run.news(0.0, 10.0) == ""
    run.add_report(0, report(OLD, 0), 1.0)
    assert run.news(1.0, 10.0) == "unpinned"


def test_inputs_hold_what_was_measured() -> None:
    run = complete()
    windows(run)
    inputs = run.inputs(PolicySettings(interval=7), 3.0, seed=5, window_seconds=1.0)
    assert (inputs.world_size, inputs.step, inputs.seed) == (4, 19, 5)
    assert inputs.settings.interval == 7
    assert inputs.families == fakes.families(OLD)
    assert inputs.backend == "gloo"
    assert inputs.current is None
    assert inputs.step_seconds > inputs.compute_seconds == 0.1
    assert [b.ready_seconds for b in inputs.buckets] == [0.0, 0.01, 0.02, 0.03]
    link = fakes.Link()
    dense = [o for o in inputs.operations if o.bytes == 4 << 20]
    assert {o.transfer_seconds for o in dense} == {link.seconds("all_reduce", 4 << 20, 4, 3)}
    assert {o.age_seconds for o in inputs.operations} == {2.0}
    assert len(inputs.compute) == 5


def test_inputs_hold_what_the_program_observed_and_what_overflowed() -> None:
    run = complete()
    for rank in range(4):
        counters = Counters(nonfinite_steps=3 if rank == 2 else 1)
        window = report(OLD, rank, loss=1.0 + rank, lr=0.1, counters=counters)
        assert run.add_report(rank, window, 1.0) == ""
    inputs = run.inputs(PolicySettings(), 2.0)
    assert (inputs.loss, inputs.lr, inputs.nonfinite_steps) == (2.5, 0.1, 3)
    for rank in range(4):
        run.add_report(rank, report(OLD, rank, 2, counters=Counters(nonfinite_steps=5)), 3.0)
    later = run.inputs(PolicySettings(), 3.0)
    assert math.isnan(later.loss)
    assert math.isnan(later.lr)
    assert later.nonfinite_steps == 5
    text = to_json(later)
    assert to_json(from_json(Inputs, text)) == text


def test_measured_compute_follows_the_plan_in_force() -> None:
    run = complete()
    plan = fakes.plan(OLD, option=BF16)
    run.record(decision(plan), 0.0)
    windows(run, plan=plan)
    inputs = run.inputs(PolicySettings(), 2.0)
    assert inputs.current == plan
    newest = inputs.compute[-1]
    assert (newest.compressor, newest.compress_seconds) == ("bf16", 1e-6)
    windows(run, 3.0, plan, sequence=4)
    assert run.inputs(PolicySettings(), 3.0).steps_since_switch == 49 - 10


def test_impossible_reports_are_counted_and_not_used() -> None:
    run = complete()
    for bad in (
        report(OLD, 0, step_seconds=math.nan),
        report(OLD, 0, buckets=()),
        replace(report(OLD, 0), first_step=50),
    ):
        with pytest.raises(ProtocolError):
            run.add_report(0, bad, 1.0)
    assert run.refused == {"invalid": 3}
    assert run.measured() is None


def test_memory_is_bounded() -> None:
    run = complete()
    for sequence in range(1, 200):
        windows(run, float(sequence), sequence=sequence)
    assert all(len(m.reports) <= RECENT_REPORTS for m in run.members.values())
    assert len(run.inputs(PolicySettings(), 200.0).operations) <= 100


# --- decisions -----------------------------------------------------------------------------------


def decision(
    plan: Plan | None, outcome: str = "switch", id_: int = 0, **fields: object
) -> Decision:
    values = {"run": "run", "model": "model", "term": 1, "id": plan.id if plan else id_}
    values |= {"step": 1, "created": time.time(), "policy": "p", "outcome": outcome, "reason": "r"}
    return Decision(**{**values, "plan": plan, **fields})  # type: ignore[arg-type]


def test_a_rejected_plan_returns_to_the_one_in_force() -> None:
    run = complete()
    first, second = fakes.plan(OLD, 1), fakes.plan(OLD, 2)
    run.record(decision(first), 0.0)
    windows(run, plan=first)
    run.record(decision(second), 1.0)
    assert not run.acknowledge(0, Ack(1, 1, "rejected", 3))  # an old one
    assert not run.acknowledge(0, Ack(1, 2, "held", 3))
    assert run.acknowledge(0, Ack(1, 2, "rejected", 3, "why"))
    assert run.plans.newest == first
    assert run.setbacks == 1
    third = fakes.plan(OLD, 3)
    run.record(decision(third), 2.0)
    windows(run, 3.0, third, sequence=2)
    assert run.setbacks == 0  # the ranks took one again


def test_what_the_store_knows_comes_back() -> None:
    plan = fakes.plan(OLD, 5)
    stored = StoredRun("run", "model", "first", ("zero",), True, BF16, 4, 70)
    link = LinkEstimate(1e-3, 1e-9, age_seconds=1.0)
    newest = decision(None, "keep", 6, link=link, created=time.time() - 100, inputs_json="x")
    run = complete(memory=Memory(stored, newest, plan))
    assert run.plans.newest == plan
    assert run.plans.next_id == 7
    assert (run.frozen, run.pinned, run.step) == (True, BF16, 70)
    assert run.link_age(0.0) == pytest.approx(101.0, abs=5)
    assert run.decision == replace(newest, inputs_json="")
    with pytest.raises(RefusedError):
        run.join(hello(0, incarnation="zero"), 0.0)


def test_the_safe_plan_of_the_ranks_is_what_is_in_force() -> None:
    plan = fakes.plan(OLD, 5, option=Option("topk", 0.01, "allgather"))
    run = Run("run", "model", Memory(None, None, plan), 0.0)
    safe = replace(plan, default=BF16, policy="safe")
    for rank in range(4):
        run.join(hello(rank, plan=safe), 0.0)
        run.set_catalog(rank, catalog(OLD))
    windows(run, plan=safe)
    assert run.in_force() == safe
    assert summary(run).plan_label == "bf16 native"


def test_what_a_policy_learned_survives_a_restart_of_the_controller_but_not_of_the_job() -> None:
    history = History("layout", (GainRecord("topk", (), 0.01, 0.5, 9),))
    first = complete()
    first.history = history
    windows(first)
    text = to_json(first.inputs(PolicySettings(), 2.0))
    newest = decision(None, "keep", 6, inputs_json=text)
    run = Run("run", "model", Memory(None, newest, None), 0.0)
    assert run.history == history
    run.join(hello(0, incarnation="another"), 0.0)
    assert run.history == History()


def test_what_a_guard_undid_is_counted() -> None:
    run = complete()
    before = run.history
    run.learn(Outcome("keep", "why"))
    assert run.history is before
    run.learn(Outcome("switch", "why", history=History("layout"), undone="cost"))
    assert run.history == History("layout")
    assert run.decisions.undone == {"cost": 1}


def test_the_start_option_is_what_the_ranks_say() -> None:
    run = complete()
    windows(run)
    assert run.inputs(PolicySettings(), 2.0).start is None
    said = Run("run", "model", Memory(), 0.0)
    started = Plan(0, 0, "", default=BF16, policy="start")
    for rank in range(4):
        said.join(hello(rank, plan=started), 0.0)
        said.set_catalog(rank, catalog(OLD))
    windows(said)
    inputs = said.inputs(PolicySettings(), 2.0)
    assert (inputs.start, inputs.current) == (BF16, None)
    assert said.plans.next_id == 1


def test_waiting_is_counted_under_the_present_plan() -> None:
    run = complete()
    windows(run)
    # Of 0, 1/4, 1/2 and 3/4 of the planted straggling the median rank waits 3/8, in each bucket.
    waited = 4 * 3 / 8 * fakes.Link().straggle
    assert run.inputs(PolicySettings(), 2.0).straggle_seconds == pytest.approx(waited)
    plan = fakes.plan(OLD, option=BF16)
    run.record(decision(plan), 2.0)
    for rank in range(4):
        quiet = report(OLD, rank, 2, plan, link=fakes.Link(straggle=0.0))
        run.add_report(rank, quiet, 3.0)
    assert run.inputs(PolicySettings(), 3.0).straggle_seconds == 0.0


def test_prediction_and_measurement_agree_where_ranks_wait_for_each_other() -> None:
    run = complete()
    plan = fakes.plan(OLD, option=DENSE)
    run.record(decision(plan), 0.0)
    fast = fakes.Link(alpha=1e-5, beta=8e-11, straggle=0.04)
    for rank in range(4):
        run.add_report(rank, report(OLD, rank, 1, plan, link=fast), 1.0)
    inputs = run.inputs(PolicySettings(), 2.0)
    assert inputs.step_seconds > 1.25 * inputs.compute_seconds  # nearly all of it is waiting
    current = POLICIES.get("adaptive")().decide(inputs).current
    assert current is not None
    assert current.step_seconds == pytest.approx(inputs.step_seconds, rel=0.1)


def test_a_new_layout_and_a_new_session_end_the_wait_for_a_probe() -> None:
    run = complete()
    for change in (
        lambda: run.set_catalog(0, catalog(NEW)),
        lambda: run.join(hello(1), 1.0),
        lambda: run.join(hello(0, incarnation="second"), 2.0),
    ):
        run.probes.ask(3, 10, range(4), 100.0)
        assert run.probes.pending(1.0) == 3
        change()
        assert run.probes.pending(1.0) == 0


def test_states() -> None:
    run = Run("run", "model", Memory(), 0.0)
    assert run.state == "ended"
    run.join(hello(0, 2), 0.0)
    assert run.state == "starting"
    run.set_catalog(0, catalog(OLD))
    assert run.state == "incomplete"
    run.join(hello(1, 2), 0.0)
    assert run.state == "running"
    run.leave(0, 5.0)
    run.leave(1, 6.0)
    assert (run.state, run.ended_at) == ("ended", 6.0)
    with pytest.raises(NotFoundError):
        Run("run", "model", Memory(), 0.0).inputs(PolicySettings(), 0.0)


def test_the_number_of_runs_is_bounded_and_ended_ones_make_room() -> None:
    runs = Runs(limit=2, grace_seconds=10.0)
    first = runs.add(Run("a", "m", Memory(), 0.0), 0.0)
    runs.add(Run("b", "m", Memory(), 5.0), 5.0)
    with pytest.raises(CapacityError, match="max_runs"):
        runs.add(Run("c", "m", Memory(), 6.0), 6.0)
    first.join(hello(0), 7.0)
    runs.add(Run("c", "m", Memory(), 15.0), 15.0)
    assert sorted(r.run for r in runs) == ["a", "c"]
    assert runs.models("a") == ("m",)


def test_inputs_name_the_rank_that_all_wait_for() -> None:
    run = complete()
    windows(run)  # three steps of four buckets; the planted link lets later ranks wait less
    given = run.inputs(PolicySettings(), 2.0)
    assert given.slowest_rank == 3
    assert given.slowest_seconds == pytest.approx(0.75 * fakes.Link().straggle)


def test_every_look_is_noted_with_the_plan_in_force() -> None:
    run, plan = complete(), fakes.plan(OLD, 1)
    run.aftermath.sent(Since(1, "dense", 0.3))
    run.record(decision(plan), 0.0)
    windows(run, 1.0)
    run.look()
    waiting = run.aftermath.find(1)
    assert waiting is not None
    assert waiting.first_step == -1
    windows(run, 2.0, plan, sequence=2)
    run.inputs(PolicySettings(), 3.0)
    noted = run.aftermath.find(1)
    now = run.measured()
    assert noted is not None
    assert now is not None
    assert (noted.first_step, noted.last_step) == (20, 29)
    assert noted.measured == (now.step_seconds,)
    assert noted.gain == now.gain
    run.join(hello(0, incarnation="another"), 4.0)
    assert run.aftermath.find(1) is None

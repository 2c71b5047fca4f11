"""What one rank holds and when it asks the others; the exchange itself is in test_agreement."""

from __future__ import annotations

from typing import Any

import pytest

from gradpilot.errors import ConfigError, ProtocolError
from gradpilot.protos.messages import (
    DENSE,
    START_INTERVAL,
    START_PROBE,
    Ack,
    Assignment,
    Option,
    Plan,
    ProbeRequest,
)
from gradpilot.worker_agent.agreement import Row, Verdict
from gradpilot.worker_agent.buckets import BucketTable
from gradpilot.worker_agent.coordinator import Coordinator
from tests.worker_agent.buckets import fake_bucket, named

TOPK = Option("topk", 0.1, "allgather")


class FakeAgreement:
    """Answers with the verdicts given, one an exchange."""

    frozen = ""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)
        self.rows: list[Row] = []

    def start(self, row: Row) -> None:
        self.rows.append(row)

    def finish(self) -> Verdict:
        return self.verdicts.pop(0) if self.rows and self.verdicts else Verdict()

    def close(self) -> bool:
        return True


class FakeControlPlane:
    def __init__(self) -> None:
        self.acks: list[Ack] = []
        self.layouts = 0
        self.lost = False

    def send_ack(self, ack: Ack) -> None:
        self.acks.append(ack)

    def layout_changed(self, table: BucketTable) -> None:
        self.layouts += 1

    def controller_lost(self) -> bool:
        return self.lost


def _table() -> BucketTable:
    parameters = named([10, 20])
    table = BucketTable(parameters.items())
    for index, p in enumerate(parameters.values()):
        table.identify(fake_bucket([p], index, last=index == 1))
    table.end_step()
    return table


def _plan(table: BucketTable, number: int, option: Option = TOPK, **fields: Any) -> Plan:
    assert table.layout is not None
    assigned = tuple(Assignment(b.fingerprint, option) for b in table.layout.buckets)
    return Plan(1, number, table.layout.digest, assigned, **fields)


def _coordinator(
    agreement: FakeAgreement | None = None, plane: FakeControlPlane | None = None
) -> tuple[Coordinator, BucketTable]:
    start = Plan(0, 0, "", default=DENSE, interval=START_INTERVAL)
    coordinator = Coordinator(start, 1 if agreement is None else 4, "cpu", agreement, plane)  # type: ignore[arg-type]
    table = _table()
    coordinator.end_step(1, table, layout_changed=True)
    return coordinator, table


def test_exchanges_begin_at_the_end_of_the_step_before_a_decision_step() -> None:
    agreement = FakeAgreement()
    coordinator, table = _coordinator(agreement)
    for step in range(2, 101):
        coordinator.end_step(step, table, layout_changed=False)
    assert [row.step for row in agreement.rows] == [*range(2, 41, 2), 60, 80, 100]
    assert {row.layout for row in agreement.rows} == {table.layout.digest if table.layout else ""}


def test_a_switch_takes_effect_where_it_was_agreed_and_is_acknowledged() -> None:
    plane, agreement = FakeControlPlane(), FakeAgreement()
    coordinator, table = _coordinator(agreement, plane)
    plan = _plan(table, 7, interval=3)
    coordinator.offer(plan)
    assert coordinator.active.plan.id == 0, "holding is not switching"
    coordinator.end_step(12, table, layout_changed=False)
    assert agreement.rows[-1].held == plan
    agreement.verdicts = [Verdict(plan=plan)]
    coordinator.begin_step(12)
    assert coordinator.active.plan == plan
    assert plane.acks == [Ack(1, 7, "agreed", 12)]
    assert coordinator.counters.switches == 1
    # From now on the plan's own interval counts, and it is not put up again.
    for step in range(13, 19):
        coordinator.end_step(step, table, layout_changed=False)
    assert [row.step for row in agreement.rows[1:]] == [15, 18]
    assert agreement.rows[-1].held is None


def test_an_old_plan_is_ignored_and_a_newer_one_replaces_what_is_held() -> None:
    agreement = FakeAgreement()
    coordinator, table = _coordinator(agreement)
    coordinator.offer(_plan(table, 5))
    coordinator.offer(_plan(table, 4))
    coordinator.end_step(12, table, layout_changed=False)
    assert agreement.rows[-1].held is not None
    assert agreement.rows[-1].held.id == 5
    coordinator.offer(_plan(table, 6))
    coordinator.end_step(20, table, layout_changed=False)
    assert agreement.rows[-1].held.id == 6


def test_a_plan_for_another_layout_or_with_an_unknown_option_is_refused() -> None:
    coordinator, table = _coordinator(FakeAgreement())
    with pytest.raises(ProtocolError, match="layout"):
        coordinator.offer(Plan(1, 9, "elsewhere"))
    with pytest.raises(ConfigError, match="unknown compressor"):
        coordinator.offer(_plan(table, 9, Option("tpok", 0.1, "allgather")))


def test_a_new_layout_drops_the_held_plan_and_asks_for_a_new_catalog() -> None:
    plane, agreement = FakeControlPlane(), FakeAgreement()
    coordinator, table = _coordinator(agreement, plane)
    coordinator.offer(_plan(table, 5))
    parameters = named([30])
    other = BucketTable(parameters.items())
    other.identify(fake_bucket(list(parameters.values())))
    other.end_step()
    coordinator.end_step(12, other, layout_changed=True)
    assert agreement.rows[-1].held is None
    assert plane.layouts == 2


def test_a_plan_that_was_turned_down_is_not_put_up_again() -> None:
    plane, agreement = FakeControlPlane(), FakeAgreement()
    coordinator, table = _coordinator(agreement, plane)
    plan = _plan(table, 5)
    coordinator.offer(plan)
    coordinator.end_step(12, table, layout_changed=False)
    agreement.verdicts = [Verdict(rejected="no")]
    coordinator.begin_step(12)
    assert plane.acks == [Ack(1, 5, "rejected", 12, "no")]
    coordinator.offer(plan)
    coordinator.end_step(20, table, layout_changed=False)
    assert agreement.rows[-1].held is None


def test_a_failed_exchange_is_counted_and_keeps_the_plan() -> None:
    agreement = FakeAgreement()
    coordinator, table = _coordinator(agreement)
    coordinator.end_step(12, table, layout_changed=False)
    agreement.verdicts = [Verdict(error="control group failed")]
    coordinator.begin_step(12)
    assert coordinator.counters.agreement_failures == 1
    assert coordinator.active.plan.id == 0


def test_without_a_controller_a_compressing_plan_gives_way_to_the_safe_one_once() -> None:
    plane, agreement = FakeControlPlane(), FakeAgreement()
    coordinator, table = _coordinator(agreement, plane)
    plane.lost = True
    coordinator.end_step(12, table, layout_changed=False)
    assert not agreement.rows[-1].controller_lost, "a dense plan is safe as it is"
    agreement.verdicts = [Verdict(plan=_plan(table, 5, interval=10))]
    coordinator.begin_step(12)
    coordinator.end_step(20, table, layout_changed=False)
    assert agreement.rows[-1].controller_lost
    agreement.verdicts = [Verdict(safe=True)]
    coordinator.begin_step(20)
    assert coordinator.active.plan.policy == "safe"
    assert coordinator.active.plan.key == (1, 5)
    coordinator.end_step(30, table, layout_changed=False)
    assert not agreement.rows[-1].controller_lost
    # A controller that is back has a newer plan, and that is taken again.
    coordinator.offer(_plan(table, 6))
    coordinator.end_step(40, table, layout_changed=False)
    assert agreement.rows[-1].held is not None


def test_a_probe_is_run_once() -> None:
    agreement = FakeAgreement()
    coordinator, table = _coordinator(agreement)
    probe = ProbeRequest(3, 4096, 65536)
    coordinator.request_probe(probe)
    coordinator.end_step(12, table, layout_changed=False)
    assert agreement.rows[-1].probe == probe
    agreement.verdicts = [Verdict(probe=probe)]
    assert coordinator.begin_step(12) == probe
    coordinator.request_probe(probe)
    coordinator.end_step(20, table, layout_changed=False)
    assert agreement.rows[-1].probe is None
    assert coordinator.begin_step(20) is None


def test_the_probe_of_the_start_takes_no_number_from_the_controllers() -> None:
    agreement = FakeAgreement()
    coordinator, table = _coordinator(agreement)
    coordinator.request_probe(START_PROBE)
    coordinator.end_step(2, table, layout_changed=False)
    assert agreement.rows[-1].probe == START_PROBE
    agreement.verdicts = [Verdict(probe=START_PROBE)]
    assert coordinator.begin_step(2) == START_PROBE
    coordinator.end_step(4, table, layout_changed=False)
    assert agreement.rows[-1].probe is None, "it is run once"
    asked = ProbeRequest(START_PROBE.id, 4096, 65536)
    coordinator.request_probe(asked)
    coordinator.end_step(6, table, layout_changed=False)
    assert agreement.rows[-1].probe == asked


def test_a_single_rank_agrees_with_itself() -> None:
    coordinator, table = _coordinator(None)
    plan = _plan(table, 5)
    coordinator.offer(plan)
    coordinator.end_step(12, table, layout_changed=False)
    coordinator.begin_step(12)
    assert coordinator.active.plan == plan


def test_nothing_changes_between_decision_steps() -> None:
    agreement = FakeAgreement()
    coordinator, table = _coordinator(agreement)
    coordinator.offer(_plan(table, 5))
    for step in range(45, 60):
        coordinator.begin_step(step)
        coordinator.end_step(step, table, layout_changed=False)
    assert agreement.rows == []
    assert coordinator.active.plan.id == 0

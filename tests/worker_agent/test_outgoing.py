from __future__ import annotations

import pytest

from gradpilot.protos.messages import (
    MAX_MESSAGE_BYTES,
    Ack,
    Assignment,
    Catalog,
    ComputeSample,
    Option,
    Setting,
)
from tests.worker_agent.controllers import (
    LAYOUT,
    FakeController,
    Rank,
    Start,
    plan,
    report,
    wait_until,
)


def test_an_overflow_drops_the_oldest_reports_and_no_ack(start: Start) -> None:
    with FakeController() as gone:
        pass
    client = start(gone.address, reports=3)
    client.send_ack(Ack(1, 1, "agreed", 0))
    for number in range(5):
        client.send_report(report(number))
    assert client.dropped == 2
    with FakeController(gone.port) as fake:
        wait_until(lambda: len(fake.reports) == 3)
        assert [r.sequence for r in fake.reports] == [2, 3, 4]
        assert fake.acks == [Ack(1, 1, "agreed", 0)]
        client.close()


def _large_catalog() -> Catalog:
    sample = ComputeSample("x" * 200, (Setting("a" * 200, "b" * 200),), 0.5, 100, 0.1, 0.1)
    return Catalog(LAYOUT, (), (sample,) * (MAX_MESSAGE_BYTES // 600))


def test_a_message_that_is_too_large_is_dropped_counted_and_logged_once(
    controller: FakeController, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    client = start(controller.address, catalog=_large_catalog())
    wait_until(lambda: client.counters.too_large == 1)
    client.set_catalog(_large_catalog())
    wait_until(lambda: client.counters.too_large == 2)
    client.send_report(report(0))
    wait_until(lambda: controller.reports)
    assert not controller.catalogs
    assert client.connected
    assert caplog.text.count("Catalog not sent") == 1


def test_a_plan_too_large_for_hello_is_left_out(
    controller: FakeController, start: Start, rank: Rank
) -> None:
    many = tuple(Assignment(f"{i}{'x' * 100}", Option()) for i in range(25_000))
    rank.plan = plan(1, assignments=many)
    client = start(controller.address)
    wait_until(lambda: client.connected)
    assert controller.hellos[0].plan is None


def test_a_report_that_cannot_be_encoded_costs_only_itself(
    controller: FakeController, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    client = start(controller.address)
    client.send_report(report(1 << 70))
    client.send_report(report(1))
    wait_until(lambda: controller.reports)
    assert [r.sequence for r in controller.reports] == [1]
    assert "cannot be sent" in caplog.text

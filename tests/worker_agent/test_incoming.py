from __future__ import annotations

import math
from typing import Any

import pytest

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Ack, Assignment, Option, Plan, ProbeRequest
from tests.worker_agent.controllers import FakeController, Rank, Start, plan, report, wait_until


def test_a_good_plan_is_handed_over_and_acknowledged(
    controller: FakeController, start: Start, rank: Rank
) -> None:
    rank.step = 12
    plans: list[Plan] = []
    start(controller.address, on_plan=plans.append)
    wait_until(lambda: controller.catalogs)
    good = plan(1, assignments=(Assignment("a", Option("topk", 0.01, "allgather")),))
    controller.say(good)
    wait_until(lambda: controller.acks)
    assert plans == [good]
    assert controller.acks == [Ack(1, 1, "held", 12)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "other"}, "layout"),
        ({"default": Option(ratio=math.nan)}, "ratio"),
        ({"default": Option(collective="ring", skip=2)}, "skip"),
        ({"assignments": (Assignment("z", Option()),)}, "bucket"),
        ({"interval": 0}, "interval"),
        ({"policy": "refused by the agent"}, "no such compressor"),
        ({"policy": "a bug of ours"}, "ZeroDivisionError"),
    ],
)
def test_a_bad_plan_is_rejected_with_its_reason_and_a_good_one_still_taken(
    changes: dict[str, Any], reason: str, controller: FakeController, start: Start
) -> None:
    plans = []

    def on_plan(offered: Plan) -> None:
        if offered.policy.startswith("refused"):
            raise ConfigError("no such compressor")
        if offered.policy.startswith("a bug"):
            raise ZeroDivisionError
        plans.append(offered.id)

    client = start(controller.address, on_plan=on_plan)
    wait_until(lambda: controller.catalogs)
    controller.say(plan(5, **changes))
    wait_until(lambda: controller.acks)
    (ack,) = controller.acks
    assert (ack.id, ack.state) == (5, "rejected")
    assert reason in ack.reason
    assert client.counters.plans_rejected == 1
    controller.say(plan(4))
    wait_until(lambda: len(controller.acks) == 2)
    assert plans == [4]
    assert client.connected


def test_plans_that_are_not_newer_are_ignored(
    controller: FakeController, start: Start, rank: Rank
) -> None:
    rank.plan = plan(3, term=2)
    plans = []
    client = start(controller.address, on_plan=lambda offered: plans.append(offered.key))
    wait_until(lambda: controller.catalogs)
    for term, id_ in ((2, 2), (2, 3), (1, 9), (2, 5), (2, 4), (2, 5), (3, 1)):
        controller.say(plan(id_, term=term))
    wait_until(lambda: len(plans) == 2)
    assert plans == [(2, 5), (3, 1)]
    assert client.counters.plans_ignored == 5
    wait_until(lambda: len(controller.acks) == 2)


def test_a_plan_before_any_catalog_is_rejected(controller: FakeController, start: Start) -> None:
    start(controller.address, catalog=None)
    wait_until(lambda: controller.hellos)
    controller.say(plan(1))
    wait_until(lambda: controller.acks)
    assert controller.acks[0].state == "rejected"


def test_probes_are_handed_over_if_they_make_sense(
    controller: FakeController, start: Start
) -> None:
    probes: list[ProbeRequest] = []
    client = start(controller.address, on_probe=probes.append)
    wait_until(lambda: client.connected)
    controller.say(ProbeRequest(1, 2048, 1024))
    controller.say(ProbeRequest(2, 1024, 1 << 60))
    controller.say(ProbeRequest(3, 1024, 4096))
    wait_until(lambda: probes)
    assert probes == [ProbeRequest(3, 1024, 4096)]
    assert client.counters.protocol_errors == 2


def test_nothing_counts_before_welcome(start: Start) -> None:
    with FakeController(answers=False) as fake:
        plans: list[Plan] = []
        client = start(fake.address, on_plan=plans.append)
        wait_until(lambda: fake.catalogs)
        fake.say(plan(1))
        wait_until(lambda: client.counters.protocol_errors == 1)
        fake.say(fake.welcome(report_seconds=-1.0))
        wait_until(lambda: client.counters.protocol_errors == 2)
        assert not client.connected
        fake.say(fake.welcome())
        wait_until(lambda: client.connected)
        assert not plans
        client.close()


def test_a_callback_that_raises_harms_nothing(
    controller: FakeController, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("oops")

    client = start(controller.address, on_welcome=broken, on_probe=broken)
    wait_until(lambda: client.connected)
    controller.say(ProbeRequest(1, 1, 2))
    client.send_report(report(0))
    wait_until(lambda: controller.reports)
    assert client.connected
    assert caplog.text.count("oops") == 1


def test_another_controller_within_a_session_gets_a_session_of_its_own(
    controller: FakeController, start: Start
) -> None:
    client = start(controller.address)
    wait_until(lambda: client.connected)
    controller.say(controller.welcome(controller="impostor"))
    wait_until(lambda: len(controller.hellos) == 2)
    wait_until(lambda: client.connected)
    assert client.welcome is not None
    assert client.welcome.controller == "fake"

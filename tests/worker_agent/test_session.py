from __future__ import annotations

import threading
import time

import pytest

from gradpilot.worker_agent import session
from tests.worker_agent.controllers import FakeController, Start, report, wait_until


def test_a_silent_controller_is_given_up_and_tried_again(start: Start) -> None:
    with FakeController(answers=False) as fake:
        client = start(fake.address, timeout=0.2)
        client.send_report(report(0))
        wait_until(lambda: len(fake.hellos) >= 2)
        assert not client.connected
        assert client.seconds_since_contact() > 0.2
        assert not fake.reports  # kept for one that answers
        fake.answers = True
        wait_until(lambda: fake.reports)
        client.close()


def test_a_program_that_hangs_behind_a_live_connection_is_found_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_SECONDS", 0.2)
    hanging = threading.Event()
    released = threading.Event()
    checks = []

    def health() -> None:
        checks.append(1)
        if hanging.is_set():
            released.wait(5)

    with FakeController(health=health) as fake:
        client = start(fake.address, timeout=0.4)
        wait_until(lambda: len(checks) >= 3)
        assert client.counters.sessions == 1
        assert client.seconds_since_contact() < 0.6
        hanging.set()
        wait_until(lambda: client.counters.sessions == 2)
        released.set()
        client.close()


def test_a_controller_without_health_service_counts_as_alive(
    controller: FakeController, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HEARTBEAT_SECONDS", 0.1)
    client = start(controller.address, timeout=0.3)
    wait_until(lambda: client.connected)
    time.sleep(1.0)
    assert client.counters.sessions == 1
    assert client.seconds_since_contact() < 0.5

from __future__ import annotations

import os
import threading
import time
from typing import Any

import grpc
import pytest

from gradpilot.protos.messages import GoingAway
from gradpilot.worker_agent import retries
from gradpilot.worker_agent.client import ControllerClient
from tests.worker_agent.controllers import FakeController, Start, wait_until


def delays(code: str, number: int, *, asked: float | None = None) -> list[float]:
    backoff = retries.Backoff()
    return [backoff.delay(code, asked, answered=False, lasted_seconds=0.0) for _ in range(number)]


def test_refusals_wait_longer_than_losses() -> None:
    lost = delays("UNAVAILABLE", 200)
    assert max(lost) <= retries.LAST_RETRY_SECONDS
    assert lost[0] <= retries.FIRST_RETRY_SECONDS
    assert min(lost[20:]) < 1.0 < 4.0 < max(lost)  # full jitter
    assert 20 < max(delays("FAILED_PRECONDITION", 120)[20:]) <= 30
    assert max(delays("", 20, asked=1000.0)) <= 10.0


def test_a_good_session_starts_the_back_off_anew() -> None:
    backoff = retries.Backoff()
    seconds = retries.GOOD_SESSION_SECONDS

    def after(code: str, *, answered: bool, lasted: float) -> float:
        """Return the wait of the second try after a session, itself after many vain ones."""
        for _ in range(30):
            backoff.delay("UNAVAILABLE", None, answered=False, lasted_seconds=0.0)
        backoff.delay(code, None, answered=answered, lasted_seconds=lasted)
        return backoff.delay("UNAVAILABLE", None, answered=False, lasted_seconds=0.0)

    good = [after("UNAVAILABLE", answered=True, lasted=seconds) for _ in range(30)]
    assert max(good) <= 2 * retries.FIRST_RETRY_SECONDS
    for code, answered, lasted in (
        ("UNAVAILABLE", True, 0.9 * seconds),
        ("UNAVAILABLE", False, seconds),
        ("ABORTED", True, seconds),
    ):
        assert max(after(code, answered=answered, lasted=lasted) for _ in range(30)) > 1.0


def test_a_refusal_is_logged_once_and_tried_again_later(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "REFUSED_RETRY_SECONDS", 0.05)
    refusal = (grpc.StatusCode.FAILED_PRECONDITION, "protocol 2 wanted")
    with FakeController(refuses=refusal) as fake:
        client = start(fake.address)
        wait_until(lambda: "protocol 2 wanted" in caplog.text)
        time.sleep(0.3)
        fake.refuses = None
        wait_until(lambda: client.connected)
        client.close()
    assert caplog.text.count("protocol 2 wanted") == 1


def test_a_farewell_says_when_to_come_back(
    controller: FakeController, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    client = start(controller.address)
    wait_until(lambda: client.connected)
    said = time.monotonic()
    controller.say(GoingAway("upgrade", 0.4))
    wait_until(lambda: not client.connected)
    wait_until(lambda: len(controller.hellos) == 2)
    assert 0.35 < time.monotonic() - said < 2.0
    assert "upgrade" in caplog.text


def test_many_vain_tries_leave_nothing_behind(
    start: Start, dead_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "LAST_RETRY_SECONDS", 0.01)
    tries = []
    connect = ControllerClient._connect

    def counted(self: ControllerClient) -> Any:
        tries.append(1)
        return connect(self)

    monkeypatch.setattr(ControllerClient, "_connect", counted)
    client = start(dead_address)
    wait_until(lambda: len(tries) > 5)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    wait_until(lambda: len(tries) > 60)
    assert threading.active_count() <= threads + 3
    assert len(os.listdir("/proc/self/fd")) <= files + 8
    client.close()

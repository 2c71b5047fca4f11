from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest

from gradpilot.protos.messages import Ack, Bucket, Catalog, Hello, Layout, Welcome
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import AgentConfig
from tests.worker_agent.controllers import (
    CATALOG,
    FakeController,
    Rank,
    Start,
    plan,
    report,
    wait_until,
)


def test_hello_and_catalog_come_first_then_acks_then_reports(
    controller: FakeController, start: Start, rank: Rank
) -> None:
    rank.step = 7
    welcomes: list[Welcome] = []
    idle = ControllerClient(controller.address, rank.hello, AgentConfig(), world_size=2)
    idle.send_report(report(0))
    idle.send_ack(Ack(1, 1, "agreed", 3))
    idle.set_catalog(CATALOG)
    idle.start(on_welcome=welcomes.append)
    wait_until(lambda: len(controller.heard) == 4)
    assert controller.heard == [rank.hello(), CATALOG, Ack(1, 1, "agreed", 3), report(0)]
    assert idle.connected
    assert welcomes == [controller.welcome()] == [idle.welcome]
    assert idle.seconds_since_contact() < 2.0
    idle.close()
    assert not idle.connected


def test_a_new_catalog_is_sent_at_once(controller: FakeController, start: Start) -> None:
    client = start(controller.address)
    wait_until(lambda: controller.catalogs)
    other = Catalog(Layout.of((Bucket("c", 0, 150),)), ())
    client.set_catalog(other)
    wait_until(lambda: len(controller.catalogs) == 2)
    assert controller.catalogs == [CATALOG, other]


def test_after_a_restart_of_the_controller_the_session_resumes(start: Start, rank: Rank) -> None:
    with FakeController(name="one") as first:
        client = start(first.address)
        wait_until(lambda: client.connected)
    wait_until(lambda: not client.connected)
    time.sleep(0.5)
    rank.step, rank.plan = 50, plan(3)
    client.send_report(report(0))
    before = time.monotonic()
    with FakeController(first.port, name="two") as second:
        wait_until(lambda: second.reports)
        assert time.monotonic() - before < 10.0
        assert second.kinds() == ["Hello", "Catalog", "Report"]
        assert second.hellos == [rank.hello()]
        assert client.welcome == second.welcome()
        assert client.counters.sessions == 2
        client.close()


def test_a_proxy_in_the_environment_is_not_used(
    controller: FakeController, start: Start, dead_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://{dead_address}")
    client = start(controller.address)
    wait_until(lambda: client.connected)


@pytest.mark.parametrize("address", ["dead_address", "mute_address"])
def test_sending_never_waits(
    address: str, start: Start, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    client = start(request.getfixturevalue(address), timeout=0.3)
    slowest = 0.0
    for number in range(300):
        began = time.perf_counter()
        client.send_report(report(number))
        client.send_ack(Ack(1, 1, "held", 0))
        client.set_catalog(CATALOG)
        slowest = max(slowest, time.perf_counter() - began)
        time.sleep(0.002)
    # Locks are held for microseconds; this leaves room for a machine that is busy.
    assert slowest < 0.1
    assert client.counters.reports_dropped == 300 - 64
    assert client.counters.acks_dropped == 300 - 256
    wait_until(lambda: "training goes on" in caplog.text)
    time.sleep(0.7)
    assert caplog.text.count("training goes on") == 1


@pytest.mark.parametrize("situation", ["connected", "silent", "dead", "mute"])
def test_close_returns_in_time(
    situation: str, start: Start, dead_address: str, mute_address: str
) -> None:
    with FakeController(answers=situation == "connected") as fake:
        address = {"dead": dead_address, "mute": mute_address}.get(situation, fake.address)
        client = start(address, timeout=10.0)
        client.send_report(report(0))
        time.sleep(0.3)
        began = time.monotonic()
        client.close()
        assert time.monotonic() - began < 1.2
        client.close()
        client.send_report(report(1))  # nobody minds
        wait_until(lambda: client._thread is not None and not client._thread.is_alive(), 2.0)


def test_close_sends_what_is_queued(controller: FakeController, start: Start) -> None:
    client = start(controller.address)
    wait_until(lambda: client.connected)
    for number in range(20):
        client.send_report(report(number))
    client.send_ack(Ack(1, 1, "agreed", 5))
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 0.5  # the controller ends the stream as well
    assert len(controller.reports) == 20
    assert controller.acks


def test_a_client_that_never_started_can_be_closed(rank: Rank) -> None:
    client = ControllerClient("127.0.0.1:1", rank.hello, AgentConfig(), world_size=2)
    client.close()
    client.start()
    assert client._thread is None


_SCRIPT = """
import os, sys, time
from gradpilot.protos.messages import Hello, Report
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import AgentConfig
client = ControllerClient(
    sys.argv[1], lambda: Hello("r", "m", "1", 0, 1), AgentConfig(), world_size=1
)
report = Report("x", 0, 0, 1, 1, 1, 0.1, 0.1, 0.0)
client.start()
client.send_report(report)
"""


def _run(code: str, address: str, seconds: float = 20.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT + code, address],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.parametrize(
    ("address", "ending", "expected"),
    [
        ("controller", "", 0),
        ("controller", "sys.exit(7)", 7),
        ("dead_address", "", 0),
        ("mute_address", "", 0),
        ("mute_address", "raise RuntimeError('training failed')", 1),
    ],
)
def test_a_process_ends_whatever_the_controller_does(
    address: str, ending: str, expected: int, request: pytest.FixtureRequest
) -> None:
    where = request.getfixturevalue(address)
    code = f"time.sleep(0.3)\nprint(time.time(), flush=True)\n{ending}"
    done = _run(code, where if isinstance(where, str) else where.address)
    assert done.returncode == expected
    assert time.time() - float(done.stdout) < 2.0
    assert "Fatal" not in done.stderr


def test_a_forked_child_does_nothing_and_the_parent_goes_on(controller: FakeController) -> None:
    code = """
import signal
while not client.connected:
    time.sleep(0.01)
for leave in (lambda: os._exit(0), lambda: sys.exit(0)) * 3:
    with client._wake:  # as if another thread held it in the moment of the fork
        queued = client._outgoing.reports
        child = os.fork()
        if not child:
            signal.alarm(5)
            for number in range(1000):
                client.send_report(report)
                client.set_catalog(None)
            client.close()
            client.start()
            assert client._outgoing.reports == queued
            leave()
    assert os.waitpid(child, 0)[1] == 0
    client.send_report(report)
client.close()
"""
    done = _run(code, controller.address)
    assert (done.returncode, done.stderr) == (0, "")  # not even a word of grpc's
    assert len(controller.reports) == 7
    assert len(controller.hellos) == 1


def test_an_idle_connection_costs_next_to_nothing(controller: FakeController) -> None:
    code = """
while not client.connected:
    time.sleep(0.01)
time.sleep(0.3)
before = time.process_time()
time.sleep(1.5)
print((time.process_time() - before) / 1.5)
"""
    done = _run(code, controller.address)
    # Measured 0.2 %: grpc's own waits wake ten times a second.
    assert float(done.stdout) < 0.02, done.stdout


def test_only_rank_0_logs_an_outage(
    start: Start, rank: Rank, dead_address: str, caplog: pytest.LogCaptureFixture
) -> None:
    rank.hello = lambda: Hello("run", "model", "1", 1, 2)  # type: ignore[method-assign]
    caplog.set_level(logging.INFO)
    start(dead_address)
    time.sleep(0.5)
    assert not caplog.records


def test_an_early_import_of_grpc_is_warned_of(
    start: Start,
    dead_address: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gradpilot.worker_agent.GRPC_IMPORTED_EARLY", True)
    start(dead_address)
    assert "GRPC_ENABLE_FORK_SUPPORT" in caplog.text

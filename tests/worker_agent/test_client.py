from __future__ import annotations

import logging
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from gradpilot.errors import ConfigError
from gradpilot.protos import codec
from gradpilot.protos.messages import (
    MAX_MESSAGE_BYTES,
    Ack,
    AgentMessage,
    Assignment,
    Bucket,
    Catalog,
    ComputeSample,
    ControllerMessage,
    GoingAway,
    Hello,
    Layout,
    Option,
    Plan,
    ProbeRequest,
    Report,
    Setting,
    Welcome,
)
from gradpilot.protos.transport import SERVER_OPTIONS
from gradpilot.protos.v1 import controller_pb2, controller_pb2_grpc
from gradpilot.worker_agent import client as module
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import AgentConfig

LAYOUT = Layout.of((Bucket("a", 0, 100), Bucket("b", 1, 50)))
CATALOG = Catalog(LAYOUT, ())
HEALTH = "grpc.health.v1.Health"
Start = Callable[..., ControllerClient]


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Return as soon as the condition holds; fail after so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {seconds:g} s")
        time.sleep(0.005)


class FakeController(controller_pb2_grpc.ControllerServiceServicer):
    """Serves agents; ``with`` it.

    Args:
        port: Where to listen; 0 for any free port.
        name: Id in its Welcome.
        answers: Whether it says Welcome; if not, it takes what comes and is silent.
        refuses: Status code and text with which it ends every session instead.
        health: Called for every health check; None for no such service.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        name: str = "fake",
        answers: bool = True,
        refuses: tuple[grpc.StatusCode, str] | None = None,
        health: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.answers = answers
        self.refuses = refuses
        self.heard: list[AgentMessage] = []
        self.sessions: list[queue.Queue[ControllerMessage | None]] = []
        self._stopped = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, self._server)
        if health is not None:

            def check(request: bytes, context: grpc.ServicerContext) -> bytes:
                health()
                return b"\x08\x01"  # SERVING

            handlers: dict[str, Any] = {"Check": grpc.unary_unary_rpc_method_handler(check)}
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(HEALTH, handlers),)
            )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeController:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Hang up on everybody and free the port."""
        for session in self.sessions:
            session.put(None)
        self._server.stop(0).wait(5)

    def Session(  # noqa: N802
        self, request_iterator: Iterator[controller_pb2.AgentMessage], context: Any
    ) -> Iterator[controller_pb2.ControllerMessage]:
        if self.refuses is not None:
            context.abort(*self.refuses)
        outbox: queue.Queue[ControllerMessage | None] = queue.Queue()
        threading.Thread(target=self._read, args=(request_iterator, outbox), daemon=True).start()
        self.sessions.append(outbox)
        while (message := outbox.get()) is not None:
            yield codec.encode_controller(message)

    def _read(
        self,
        requests: Iterator[controller_pb2.AgentMessage],
        outbox: queue.Queue[ControllerMessage | None],
    ) -> None:
        try:
            for envelope in requests:
                message = codec.decode_agent(envelope)
                assert message is not None
                self.heard.append(message)
                if isinstance(message, Hello) and self.answers:
                    outbox.put(self.welcome())
        except grpc.RpcError:
            pass  # the agent hung up
        except Exception:
            if self._server is not None:
                raise
        finally:
            outbox.put(None)

    def welcome(self, **changes: Any) -> Welcome:
        """Return its answer to Hello."""
        values: dict[str, Any] = {
            "controller": self.name,
            "term": 1,
            "report_seconds": 2.0,
            "plan_ttl_seconds": 60.0,
        }
        return Welcome(**{**values, **changes})

    def say(self, message: ControllerMessage) -> None:
        """Send to the newest session."""
        self.sessions[-1].put(message)

    def kinds(self) -> list[str]:
        """Return the names of the kinds of messages heard, in order."""
        return [type(m).__name__ for m in list(self.heard)]

    @property
    def hellos(self) -> list[Hello]:
        return [m for m in list(self.heard) if isinstance(m, Hello)]

    @property
    def catalogs(self) -> list[Catalog]:
        return [m for m in list(self.heard) if isinstance(m, Catalog)]

    @property
    def reports(self) -> list[Report]:
        return [m for m in list(self.heard) if isinstance(m, Report)]

    @property
    def acks(self) -> list[Ack]:
        return [m for m in list(self.heard) if isinstance(m, Ack)]


class Rank:
    """What a rank would say in Hello."""

    def __init__(self) -> None:
        self.step = 0
        self.plan: Plan | None = None

    def hello(self) -> Hello:
        return Hello("run", "model", "1", 0, 2, step=self.step, plan=self.plan)


@pytest.fixture(autouse=True)
def _no_early_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests need grpc themselves, and may have it first."""
    monkeypatch.setattr("gradpilot.worker_agent.GRPC_IMPORTED_EARLY", False)


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def controller() -> Iterator[FakeController]:
    with FakeController() as fake:
        yield fake


@pytest.fixture
def start(rank: Rank) -> Iterator[Start]:
    """Return a function that starts a client; all are closed in the end."""
    clients: list[ControllerClient] = []

    def begin(
        address: str,
        *,
        reports: int = 64,
        timeout: float = 2.0,
        catalog: Catalog | None = CATALOG,
        **callbacks: Any,
    ) -> ControllerClient:
        config = AgentConfig(queue_reports=reports, control_timeout_seconds=timeout)
        client = ControllerClient(address, rank.hello, config, world_size=2)
        clients.append(client)
        if catalog is not None:
            client.set_catalog(catalog)
        client.start(**callbacks)
        return client

    yield begin
    for client in clients:
        client.close()


@pytest.fixture
def dead_address() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def mute_address() -> Iterator[str]:
    """An address where connections are accepted and nothing is ever said, as if stopped."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def report(sequence: int) -> Report:
    return Report(LAYOUT.digest, sequence, 0, 1, 1, 1, 0.1, 0.1, 0.0, loss=0.0, lr=0.0)


def plan(id_: int, term: int = 1, **changes: Any) -> Plan:
    return Plan(**{"term": term, "id": id_, "layout": LAYOUT.digest, **changes})


# --- connecting --------------------------------------------------------------------------------


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


def test_a_refusal_is_logged_once_and_tried_again_later(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFUSED_RETRY_SECONDS", 0.05)
    refusal = (grpc.StatusCode.FAILED_PRECONDITION, "protocol 2 wanted")
    with FakeController(refuses=refusal) as fake:
        client = start(fake.address)
        wait_until(lambda: "protocol 2 wanted" in caplog.text)
        time.sleep(0.3)
        fake.refuses = None
        wait_until(lambda: client.connected)
        client.close()
    assert caplog.text.count("protocol 2 wanted") == 1


def test_refusals_wait_longer_than_losses(rank: Rank) -> None:
    client = ControllerClient("127.0.0.1:1", rank.hello, AgentConfig(), world_size=2)
    lost = module._Session(None, 0.0, code="UNAVAILABLE")
    refused = module._Session(None, 0.0, code="FAILED_PRECONDITION")
    away = module._Session(None, 0.0, retry_seconds=1000.0)
    delays = [client._delay(lost, attempt) for attempt in range(200)]
    assert max(delays) <= module.LAST_RETRY_SECONDS
    assert delays[0] <= module.FIRST_RETRY_SECONDS
    assert min(delays[20:]) < 1.0 < 4.0 < max(delays)  # full jitter
    assert 20 < max(client._delay(refused, 20) for _ in range(100)) <= 30
    assert client._delay(away, 0) <= 10.0


# --- what a controller may do to training: nothing ---------------------------------------------


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


def test_a_program_that_hangs_behind_a_live_connection_is_found_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.2)
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
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.1)
    client = start(controller.address, timeout=0.3)
    wait_until(lambda: client.connected)
    time.sleep(1.0)
    assert client.counters.sessions == 1
    assert client.seconds_since_contact() < 0.5


def test_many_vain_tries_leave_nothing_behind(
    start: Start, dead_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_RETRY_SECONDS", 0.01)
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


# --- sizes -------------------------------------------------------------------------------------


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


# --- plans and probes --------------------------------------------------------------------------


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


# --- leaving -----------------------------------------------------------------------------------


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
        queued = len(client._reports)
        child = os.fork()
        if not child:
            signal.alarm(5)
            for number in range(1000):
                client.send_report(report)
                client.set_catalog(None)
            client.close()
            client.start()
            assert len(client._reports) == queued
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

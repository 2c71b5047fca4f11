from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gradpilot.controller.errors import StoreError
from gradpilot.controller.server import Controller, main
from gradpilot.errors import ConfigError
from gradpilot.protos.messages import GoingAway, Plan, Welcome
from tests.controller.fakes import FakeAgent, agents, config, serving, until

FIXED = ["--policy", "fixed", "--policy-settings.fixed.compressor", "bf16"]


class Process:
    """A real controller process."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.ready = folder / "ready.json"
        self.state = folder / "state.sqlite3"
        self.log = folder / "log"
        self.argv = [
            *(sys.executable, "-m", "gradpilot.controller"),
            *("--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"),
            *("--state", str(self.state), "--ready-file", str(self.ready)),
            *("--min-decision-seconds", "0", "--report-seconds", "0.2"),
            *("--log-level", "debug", *argv),
        ]
        self.child: asyncio.subprocess.Process | None = None
        self.grpc_port = self.http_port = 0

    async def start(self) -> Process:
        with self.log.open("ab") as log:
            self.child = await asyncio.create_subprocess_exec(*self.argv, stderr=log)
        await until(self.ready.exists, 20)
        content = json.loads(self.ready.read_text())
        assert content["pid"] == self.child.pid
        self.grpc_port, self.http_port = content["grpc_port"], content["http_port"]
        return self

    async def end(self, number: signal.Signals, seconds: float = 10.0) -> int:
        assert self.child is not None
        self.child.send_signal(number)
        return await asyncio.wait_for(self.child.wait(), seconds)

    def lines(self) -> list[dict[str, Any]]:
        # Other lines are the interpreter's, such as that of semaphores left by a SIGKILL.
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


@contextlib.asynccontextmanager
async def process(folder: Path, *argv: str) -> AsyncIterator[Process]:
    started = Process(folder, *argv)
    try:
        yield await started.start()
    finally:
        if started.child is not None and started.child.returncode is None:
            started.child.kill()
            await started.child.wait()


@pytest.mark.asyncio(loop_scope="session")
async def test_sigterm_says_goodbye_and_exits_0_with_an_open_stream(tmp_path: Path) -> None:
    async with process(tmp_path) as controller:
        agent = await FakeAgent().connect(controller.grpc_port)
        await agent.wait(Welcome)
        started = time.monotonic()
        assert await controller.end(signal.SIGTERM, 3.0) == 0
        assert time.monotonic() - started < 3.0
        away = await agent.wait(GoingAway)
        assert away.reason == "SIGTERM"
        assert away.reconnect_seconds > 0
        assert (await agent.ended())[0] is grpc.StatusCode.OK
        assert not controller.ready.exists()
        messages = [line["message"] for line in controller.lines()]
        assert "ready" in messages
        assert messages[-1] == "stopped"
        await agent.leave()


@pytest.mark.asyncio(loop_scope="session")
async def test_after_sigkill_a_restart_has_a_higher_term_the_plan_and_higher_numbers(
    tmp_path: Path,
) -> None:
    async with process(tmp_path, *FIXED) as controller, agents(controller.grpc_port) as ranks:
        for rank in ranks:
            await rank.report()
        plan = await ranks[0].wait(Plan, 30.0)
        assert plan.key == (1, 1)
        assert await controller.end(signal.SIGKILL) == -signal.SIGKILL
    (tmp_path / "ready.json").unlink()
    async with (
        process(tmp_path, *FIXED) as controller,
        agents(controller.grpc_port) as ranks,
    ):
        welcome = await ranks[0].wait(Welcome)
        assert welcome.term == 2
        assert await ranks[0].wait(Plan) == plan
        for rank in ranks:
            await rank.report(plan)
        await until(lambda: any(line.get("decision") == 2 for line in controller.lines()), 30.0)
        decided = [line for line in controller.lines() if line["message"].startswith("decision")]
        assert [(d["message"], d["decision"]) for d in decided] == [
            ("decision: switch", 1),
            ("decision: keep", 2),
        ]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    async with process(tmp_path, "--drain-seconds", "60") as controller:
        assert controller.child is not None
        # A call that does not end by itself keeps the drain waiting.
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{controller.grpc_port}")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        controller.child.send_signal(signal.SIGTERM)
        async with httpx.AsyncClient() as client:
            base = f"http://127.0.0.1:{controller.http_port}"

            async def not_ready() -> bool:
                return (await client.get(f"{base}/readyz")).status_code == 503

            async with asyncio.timeout(5):
                while not await not_ready():
                    await asyncio.sleep(0.02)
            assert (await client.get(f"{base}/readyz")).text == "draining\n"
            assert (await client.get(f"{base}/healthz")).status_code == 200
        assert controller.child.returncode is None
        assert await controller.end(signal.SIGTERM, 2.0) == 128 + signal.SIGTERM
        await channel.close()


@pytest.mark.asyncio(loop_scope="session")
async def test_it_exits_when_its_parent_is_gone(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(60)"
    )
    async with process(tmp_path, "--parent-pid", str(parent.pid)) as controller:
        assert controller.child is not None
        await asyncio.sleep(0.2)
        assert controller.child.returncode is None
        parent.kill()
        await parent.wait()
        assert await asyncio.wait_for(controller.child.wait(), 5) == 0
        assert "is gone" in controller.lines()[-1]["reason"]


@pytest.mark.asyncio(loop_scope="session")
async def test_it_exits_when_the_parent_that_started_it_is_killed(tmp_path: Path) -> None:
    wanted = Process(tmp_path)
    program = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([*sys.argv[1:], '--parent-pid', str(os.getpid())],"
        " stderr=subprocess.DEVNULL)\n"
        "time.sleep(60)\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *wanted.argv)
    await until(wanted.ready.exists, 20)
    pid = json.loads(wanted.ready.read_text())["pid"]
    parent.kill()
    await parent.wait()
    await until(lambda: not wanted.ready.exists(), 6)
    await until(lambda: not _runs(pid), 6)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("kind", ["grpc", "http"])
async def test_a_second_controller_on_a_port_is_refused_naming_it(kind: str) -> None:
    async with serving() as first:
        port = first.grpc_port if kind == "grpc" else first.http_port
        second = Controller(config(**{f"{kind}_address": f"127.0.0.1:{port}"}))
        with pytest.raises(ConfigError, match=rf"{kind}_address 127.0.0.1:{port}.*another"):
            await second.start()
        agent = await FakeAgent().connect(first.grpc_port)
        assert (await agent.wait(Welcome)).controller == first.id
        await agent.leave()


def test_the_second_process_on_a_port_exits_non_zero(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = ["--grpc-address", f"127.0.0.1:{port}", "--http-address", "127.0.0.1:0"]
        done = subprocess.run(
            [sys.executable, "-m", "gradpilot.controller", *argv, "--state", ":memory:"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 1
    last = json.loads(done.stderr.splitlines()[-1])
    assert last["level"] == "critical"
    assert str(port) in last["message"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_second_controller_on_a_state_file_is_refused(tmp_path: Path) -> None:
    state = str(tmp_path / "s.sqlite3")
    async with serving(state=state) as first:
        with pytest.raises(StoreError, match=f"pid {os.getpid()}"):
            await Controller(config(state=state)).start()
        assert first.store.failure == ""


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--polcy", "x"], "--polcy"),
        (["--policy", "adaptve"], "unknown policy 'adaptve'; known: "),
        (["--grpc-address", "0.0.0.0:1"], "--insecure"),
    ],
)
def test_usage_errors_exit_2_with_one_line(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


async def grpc_reflection_names(channel: grpc.aio.Channel) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await asyncio.wait_for(call.read(), 5)
    call.cancel()
    return {service.name for service in answer.list_services_response.service}


@pytest.mark.asyncio(loop_scope="session")
async def test_health_and_reflection() -> None:
    async with (
        serving() as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.grpc_port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "gradpilot.v1.ControllerService", "gradpilot.v1.OperatorService"):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = await stub.Check(request, timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        names = grpc_reflection_names(channel)
        assert {"gradpilot.v1.ControllerService", "gradpilot.v1.OperatorService"} <= await names


@pytest.mark.asyncio(loop_scope="session")
async def test_a_listener_that_cannot_be_had_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot resolve http_address"):
        await Controller(config(http_address="nowhere.invalid:1", insecure=True)).start()
    with pytest.raises(ConfigError, match=r"grpc_address 192\.0\.2\.1:1"):  # not ours (TEST-NET-1)
        await Controller(config(grpc_address="192.0.2.1:1", insecure=True)).start()


@pytest.mark.asyncio(loop_scope="session")
async def test_agents_that_come_while_it_drains_are_told_to_wait() -> None:
    async with serving() as controller:
        controller.sessions.say_goodbye(GoingAway("test", 1.0))
        agent = await FakeAgent().connect(controller.grpc_port, with_catalog=False)
        assert await agent.wait(GoingAway) == GoingAway("test", 1.0)
        assert (await agent.ended())[0] is grpc.StatusCode.OK
        await agent.leave()


def test_it_never_loads_torch_nor_the_agent() -> None:
    program = (
        "import sys, gradpilot.controller.server\n"
        "from gradpilot.policies.base import POLICIES\n"
        "POLICIES.names()\n"
        "print([m for m in ('torch', 'pymoo', 'gradpilot.worker_agent') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "[]"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"

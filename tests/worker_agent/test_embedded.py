from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradpilot.protos.messages import Bucket, Catalog, Hello, Layout, Report
from gradpilot.worker_agent import embedded
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import AgentConfig
from gradpilot.worker_agent.embedded import EmbeddedController
from tests.conftest import require_tool

TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "NCCL_DEBUG": "INFO",
    "SLURM_JOB_ID": "1",
    "GRADPILOT_POLICY": "nonsense",
    "OMP_NUM_THREADS": "8",
    "NOTIFY_SOCKET": "/run/x",
}


@pytest.fixture(autouse=True)
def _own_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Controllers that fail or are killed leave their log behind; not in /tmp."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_the_child_gets_the_environment_without_what_is_about_the_rank() -> None:
    env = {**TORCHRUN, "PATH": "/bin", "GRADPILOT_CTL_SEED": "3", "HOME": "/root"}
    made = embedded._environment(env)
    assert made["OMP_NUM_THREADS"] == "1"
    assert {"PATH", "HOME", "GRADPILOT_CTL_SEED"} <= set(made)
    assert not (set(TORCHRUN) - {"OMP_NUM_THREADS"}) & set(made)


def test_what_the_extra_lacks_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    version = importlib.metadata.version

    def without_pymoo(name: str) -> str:
        if name == "pymoo":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_pymoo)
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda _: ['pymoo<0.7,>=0.6; extra == "controller"', 'absent; extra == "demo"', "grpcio"],
    )
    assert embedded.start(AgentConfig()) is None
    (record,) = caplog.records
    assert "needs pymoo" in record.getMessage()
    assert embedded.INSTALL in record.getMessage()
    assert "training goes on" in record.getMessage()


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {seconds:g} s"
        time.sleep(0.005)


def _gone(pid: int) -> bool:
    """Return whether a process has ended, be it reaped or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.fixture
def _extra() -> None:
    require_tool(lambda: not embedded._missing_requirements(), embedded.INSTALL)


@pytest.fixture
def running(_extra: None) -> Iterator[EmbeddedController]:
    child = embedded.start(AgentConfig(), {**os.environ, **TORCHRUN})
    assert child is not None
    yield child
    child.stop(0.5)


@pytest.mark.processes
def test_it_serves_agents_and_metrics_and_ends_when_told(
    running: EmbeddedController, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = Layout.of((Bucket("a", 0, 100),))
    hello = Hello("run", "model", "1", 0, 1)
    client = ControllerClient(running.grpc_address, lambda: hello, AgentConfig(), world_size=1)
    client.set_catalog(Catalog(layout, ()))
    client.start()
    wait_until(lambda: client.connected)
    assert running.metrics_url == f"http://{running.http_address}/metrics"
    with urllib.request.urlopen(running.metrics_url, timeout=5) as answer:
        assert b"gradpilot" in answer.read()
    client.close()
    began = time.monotonic()
    running.stop()
    assert time.monotonic() - began < 2.5
    assert running._process.returncode == 0
    assert not running._folder.exists()
    running.stop()
    assert capfd.readouterr() == ("", "")  # the rank's terminal stays the rank's


@pytest.mark.processes
def test_it_is_a_process_that_minds_its_own_business(running: EmbeddedController) -> None:
    proc = Path(f"/proc/{running.pid}")
    assert "torch" not in (proc / "maps").read_text().lower()
    assert (proc / "cwd").readlink() == running._folder
    environment = (proc / "environ").read_text()
    assert "RANK=" not in environment
    assert "SLURM" not in environment
    assert os.getpgid(running.pid) != os.getpgid(0)  # Ctrl-C does not reach it
    assert os.getpriority(os.PRIO_PROCESS, running.pid) > os.getpriority(os.PRIO_PROCESS, 0)
    wait_until(lambda: '"ready"' in running.log_path.read_text())  # logged after the file is there
    running._pid = -1  # as in a forked child of the rank
    running.stop()
    assert not _gone(running.pid)
    running._pid = os.getpid()


@pytest.mark.processes
def test_a_stopped_one_costs_nothing_is_found_again_and_can_be_killed(
    running: EmbeddedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradpilot.worker_agent.session.HEARTBEAT_SECONDS", 0.3)
    hello = Hello("run", "model", "1", 0, 1)
    client = ControllerClient(
        running.grpc_address,
        lambda: hello,
        AgentConfig(control_timeout_seconds=0.5),
        world_size=1,
    )
    client.start()
    wait_until(lambda: client.connected)
    os.kill(running.pid, signal.SIGSTOP)
    slowest, number = 0.0, 0
    while client.connected:
        began = time.perf_counter()
        client.send_report(Report("x" * 1000, number, 0, 1, 1, 1, 0.1, 0.1, 0.0))
        slowest = max(slowest, time.perf_counter() - began)
        number += 1
        time.sleep(0.001)
    assert slowest < 0.1
    assert client.seconds_since_contact() > 0.5
    os.kill(running.pid, signal.SIGCONT)
    wait_until(lambda: client.connected)
    os.kill(running.pid, signal.SIGSTOP)
    began = time.monotonic()
    client.close()
    running.stop(0.3)
    assert time.monotonic() - began < 2.0
    assert _gone(running.pid)


_PARENT = """
import sys, time
from gradpilot.worker_agent import embedded
from gradpilot.worker_agent.config import AgentConfig
if __name__ == "__main__":
    child = embedded.start(AgentConfig())
    print(child.pid, flush=True)
    if sys.argv[1:] == ["wait"]:
        time.sleep(60)
"""


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["killed", "returns"])
@pytest.mark.usefixtures("_extra")
def test_it_ends_with_its_parent_beside_folders_that_shadow_ours(
    ending: str, tmp_path: Path
) -> None:
    for name in ("controller", "policies", "protos", "numpy", "grpc_health", "uvicorn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('wrong package')\n")
    script = tmp_path / "train.py"
    script.write_text(_PARENT)
    command = [sys.executable, str(script), *(["wait"] if ending == "killed" else [])]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if ending == "killed":
            assert not _gone(pid)
            parent.kill()
        parent.wait(10)
    wait_until(lambda: _gone(pid), 5.0)


@pytest.mark.processes
@pytest.mark.usefixtures("_extra")
def test_the_end_of_the_thread_that_started_it_is_not_the_end(tmp_path: Path) -> None:
    started: list[EmbeddedController | None] = []
    config = AgentConfig(state=str(tmp_path / "state"))
    thread = threading.Thread(target=lambda: started.append(embedded.start(config)))
    thread.start()
    thread.join()
    (child,) = started
    assert child is not None
    time.sleep(0.3)
    assert not _gone(child.pid)
    # A second one on the same state is turned away by the first one's lock.
    assert embedded.start(config) is None
    child.stop()
    assert {"controller.log", "controller.sqlite3"} <= set(os.listdir(tmp_path / "state"))


@pytest.mark.processes
@pytest.mark.usefixtures("_extra")
def test_one_that_cannot_start_is_logged_in_one_line_with_its_own_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    began = time.monotonic()
    assert embedded.start(AgentConfig(policy="nonsense")) is None
    assert time.monotonic() - began < 10
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "nonsense" in record.getMessage()
    assert "training goes on" in record.getMessage()


def test_one_that_is_not_ready_in_time_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(embedded, "_missing_requirements", list)
    monkeypatch.setattr(
        embedded,
        "_BOOTSTRAP",
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)",
    )
    assert embedded.start(AgentConfig(embedded_timeout_seconds=0.5)) is None
    assert "not ready within 0.5 s" in caplog.text
    assert _gone(int(pid_file.read_text()))


def test_a_state_folder_that_cannot_be_made_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(embedded, "_missing_requirements", list)
    (tmp_path / "file").write_text("")
    assert embedded.start(AgentConfig(state=str(tmp_path / "file" / "state"))) is None
    assert "training goes on" in caplog.text


def test_a_fixed_option_reaches_the_command_line(tmp_path: Path) -> None:
    config = AgentConfig(option="topk ratio=0.01 collective=allgather selection=star")
    command = embedded._command(config, tmp_path, tmp_path / "ready")
    fixed = json.loads(command[command.index("--policy-settings.fixed") + 1])
    assert command[command.index("--policy") + 1] == "fixed"
    assert fixed["compressor"] == "topk"
    assert fixed["settings"] == {"selection": "star"}
    assert embedded._command(AgentConfig(policy="adaptive"), tmp_path, tmp_path)[-2:] == [
        "--policy",
        "adaptive",
    ]

"""A controller of the job's own, for jobs that name none: a child of the first rank.

It must not disturb training: it gets one thread for numerics, a low priority, no part of torchrun's
environment, a file instead of the rank's terminal, an empty working directory, and it ends with its
parent whatever happens to that.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gradpilot
from gradpilot.protos.option_text import parse_option
from gradpilot.worker_agent.config import AgentConfig

log = logging.getLogger("gradpilot.agent")

INSTALL = "pip install 'gradpilot[controller]'"

_WITHOUT = "; training goes on without a controller, under the plan it began with"

_DROPPED_NAMES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "STATE_DIRECTORY"),
    }
)
_DROPPED_PREFIXES = ("TORCH", "PYTORCH_", "NCCL_", "GLOO_", "SLURM_", "OMPI_", "PMI", "GRADPILOT_")
_KEPT_PREFIX = "GRADPILOT_CTL_"

_SET = {
    # The controller computes on small arrays; more threads would only take cores from training.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
}

# Run by the child before the controller: what must be done inside it, and needs no fork hook, which
# is not safe in a process with threads.
_BOOTSTRAP = """
import ctypes, os, runpy, signal, sys
root, parent = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
if root not in sys.path:
    sys.path.append(root)
os.nice(5)
if parent:
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, where there is one
    except (AttributeError, OSError):
        pass
    if os.getppid() != parent:
        sys.exit("the parent ended before the controller began")
runpy.run_module("gradpilot.controller", run_name="__main__", alter_sys=True)
"""


@dataclass(slots=True, eq=False)
class EmbeddedController:
    """A running child.

    Attributes:
        grpc_address: ``host:port`` for agents and operators.
        http_address: ``host:port`` of ``/metrics``, ``/healthz`` and ``/readyz``.
        log_path: Where its output goes.
    """

    grpc_address: str
    http_address: str
    log_path: Path
    _process: subprocess.Popen[bytes]
    _folder: Path
    _pid: int

    @property
    def metrics_url(self) -> str:
        """Return where its metrics are served."""
        return f"http://{self.http_address}/metrics"

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    def stop(self, timeout: float = 2.0) -> None:
        """End it: ask, wait so long, kill. Does nothing in a forked child of the rank."""
        if os.getpid() != self._pid:
            return
        ended_by_itself = self._process.poll() is not None
        _end(self._process, timeout)
        if not ended_by_itself or self._process.returncode == 0:  # else its log may be wanted
            shutil.rmtree(self._folder, ignore_errors=True)


def start(config: AgentConfig, env: Mapping[str, str] | None = None) -> EmbeddedController | None:
    """Start a controller on free loopback ports and wait until it is ready.

    Returns:
        The running child, or None if there can be none; why is logged in one line.
    """
    env = os.environ if env is None else env
    missing = _missing_requirements()
    if missing:
        log.warning(
            "the embedded controller needs %s, not installed: %s, or set"
            " GRADPILOT_CONTROLLER=host:port, or GRADPILOT_CONTROLLER=off" + _WITHOUT,
            ", ".join(missing),
            INSTALL,
        )
        return None
    folder = Path(tempfile.mkdtemp(prefix="gradpilot-"))
    state = Path(config.state).resolve() if config.state else folder
    log_path = state / "controller.log"
    process: subprocess.Popen[bytes] | None = None
    try:
        state.mkdir(parents=True, exist_ok=True)
        ready_file = folder / "ready.json"
        with log_path.open("ab") as output:
            process = subprocess.Popen(
                _command(config, state, ready_file),
                cwd=folder,
                env=_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the rank, which then ends its child
            )
        ready = _await_ready(process, ready_file, config.embedded_timeout_seconds)
        grpc_address = f"127.0.0.1:{ready['grpc_port']}"
        http_address = f"127.0.0.1:{ready['http_port']}"
    except (OSError, _NotReadyError, KeyError) as error:
        if process is not None:
            _end(process, 0.5)
        log.warning(
            "the embedded controller did not start: %s%s" + _WITHOUT, error, _tail(log_path)
        )
        return None
    except BaseException:  # Ctrl-C while waiting
        if process is not None:
            _end(process, 0.5)
        raise
    log.info(
        "started a controller at %s (metrics at http://%s/metrics, log in %s)",
        grpc_address,
        http_address,
        log_path,
    )
    return EmbeddedController(grpc_address, http_address, log_path, process, folder, os.getpid())


class _NotReadyError(Exception):
    """The child ended or took too long."""


def _command(config: AgentConfig, state: Path, ready_file: Path) -> list[str]:
    # The signal at the parent's death comes when the *thread* that forked ends, so only the main
    # thread may ask for it; from others the controller's own look at parent_pid has to do.
    in_main_thread = threading.current_thread() is threading.main_thread()
    root = str(Path(gradpilot.__file__).resolve().parent.parent)
    command = [sys.executable, "-P", "-c", _BOOTSTRAP, root]
    command += [str(os.getpid() if in_main_thread else 0)]
    command += ["--grpc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0"]
    command += ["--state", str(state / "controller.sqlite3")]
    command += ["--ready-file", str(ready_file), "--parent-pid", str(os.getpid())]
    command += ["--drain-seconds", "0.2"]
    if config.policy and not config.option:
        command += ["--policy", config.policy]
    if config.option:
        fixed = asdict(parse_option(config.option))
        fixed["settings"] = {s["name"]: s["value"] for s in fixed["settings"]}
        command += ["--policy", config.policy or "fixed"]
        command += ["--policy-settings.fixed", json.dumps(fixed)]
    return command


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the child's environment: the rank's without what is about the rank."""
    kept = {
        name: value
        for name, value in env.items()
        if name.startswith(_KEPT_PREFIX)
        or not (name in _DROPPED_NAMES or name.startswith(_DROPPED_PREFIXES))
    }
    return {**kept, **_SET}


def _await_ready(
    process: subprocess.Popen[bytes], ready_file: Path, timeout_seconds: float
) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise _NotReadyError(f"it ended with exit code {process.returncode}")
        try:
            ready = json.loads(ready_file.read_text())
        except (FileNotFoundError, ValueError):  # not there yet, or half written
            time.sleep(0.02)
            continue
        if isinstance(ready, dict):
            return ready
    raise _NotReadyError(f"it was not ready within {timeout_seconds:g} s")


def _end(process: subprocess.Popen[bytes], timeout: float) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _missing_requirements() -> list[str]:
    """Return what the ``controller`` extra asks for and is not installed."""
    try:
        requirements = importlib.metadata.requires("gradpilot") or []
    except importlib.metadata.PackageNotFoundError:
        return []  # run from a checkout: the child will say what it lacks
    missing = []
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        if name and re.search(r"""extra\s*==\s*['"]controller['"]""", requirement):
            try:
                importlib.metadata.version(name.group())
            except importlib.metadata.PackageNotFoundError:
                missing.append(name.group())
    return missing


def _tail(path: Path) -> str:
    """Return the last line that the child wrote, and where the rest is."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f" ({lines[-1][:300]}; see {path})" if lines else ""

"""Run by ``test_hygiene`` in a network of its own: who reaches a controller, and who does not.

    python -m tests.training.hostile_network BIND ADDRESS ...

A controller listens on BIND, then agents and operators try to reach it at every ADDRESS. What came
of it is printed as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc

from gradpilot.operate import OperatorClient
from gradpilot.protos.messages import Hello
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import AgentConfig

SECONDS = 10.0


def _start(bind: str, folder: Path) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "gradpilot.controller", "--grpc-address", bind, "--insecure"]
    places = ["--http-address", "127.0.0.1:0", "--state", ":memory:"]
    return subprocess.Popen(
        [*program, *places, "--ready-file", str(folder / "ready.json")],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _agent(address: str, number: int) -> bool:
    """Return whether an agent gets a Welcome."""
    hello = Hello(f"run{number}", "model", "1", 0, 1)
    client = ControllerClient(address, lambda: hello, AgentConfig(), world_size=1)
    client.start()
    deadline = time.monotonic() + SECONDS
    while not client.connected and time.monotonic() < deadline:
        time.sleep(0.01)
    connected = client.connected
    client.close()
    return connected


def _operator(address: str) -> bool:
    with OperatorClient(address) as client:
        return len(client.runs()) > 0


def _careless(address: str) -> bool:
    """Return whether a channel without our options comes through within a second."""
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=1.0)
        except grpc.FutureTimeoutError:
            return False
    return True


def main(bind: str, *addresses: str) -> None:
    """Print what came of it."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        process = _start(bind, Path(name))
        ready = Path(name) / "ready.json"
        deadline = time.monotonic() + SECONDS
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if ready.exists():
            port = json.loads(ready.read_text())["grpc_port"]
            reached = [f"{host}:{port}" for host in addresses]
            found["agents"] = [_agent(address, i) for i, address in enumerate(reached)]
            found["operators"] = [_operator(address) for address in reached]
            found["careless"] = _careless(reached[-1])
        process.terminate()
        out, err = process.communicate(timeout=SECONDS)
        found["code"] = process.returncode
        found["said"] = [line for line in (out + err).splitlines() if "cannot start" in line]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

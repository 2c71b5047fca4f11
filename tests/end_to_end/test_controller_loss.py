"""A real controller dies by SIGKILL in the middle of a run and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradpilot.operate import OperatorClient, OperatorError
from gradpilot.protos.messages import BF16, Option, RunRef
from gradpilot.worker_agent.agent import attach
from tests.ranks import free_port, run_ranks
from tests.worker_agent import training

pytestmark = pytest.mark.processes

TOPK = Option("topk", 0.1, "allgather")
RUN = RunRef("loss-test")


class Controller:
    """A controller process with a state file and fixed ports, so that it can be started again."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._folder, self._http = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ready = self._folder / "ready.json"
        ready.unlink(missing_ok=True)
        with (self._folder / "controller.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gradpilot.controller"),
                    *("--grpc-address", self.address),
                    *("--http-address", f"127.0.0.1:{self._http}"),
                    *("--state", str(self._folder / "state.sqlite3")),
                    *("--ready-file", str(ready)),
                    *("--report-seconds", "0.5"),
                    *("--policy-settings.interval", "10"),
                    # What the policy chooses on loopback is not the point; orders are.
                    *("--min-decision-seconds", "3600"),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 20
        while not ready.exists():
            assert self._process.poll() is None, (self._folder / "controller.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        json.loads(ready.read_text())

    def kill(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        assert self._process.wait(5) == -signal.SIGKILL

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            assert self._process.wait(10) == 0


@contextlib.contextmanager
def _controller(folder: Path) -> Iterator[Controller]:
    controller = Controller(folder)
    controller.start()
    try:
        yield controller
    finally:
        controller.stop()


def _train(rank: int, address: str, stop: str) -> dict[str, Any]:
    net = training.wrap()
    handle = attach(net, controller=address, run=RUN.run, control_timeout_seconds=5.0)
    seen: list[tuple[int, tuple[int, int], str]] = []
    slowest, equal, step = 0.0, True, 0
    deadline = time.monotonic() + 50
    while True:
        begun = time.monotonic()
        for p in net.parameters():
            p.grad = None
        training.backward(net, rank, step)
        if step > 5:
            slowest = max(slowest, time.monotonic() - begun)
        step += 1
        plan = handle.plan
        if not seen or seen[-1][1] != plan.key:
            seen.append((step, plan.key, plan.options()[0].label))
        if step % 20 == 0:
            equal &= training.same_everywhere(training.digest(training.gradients(net)))
            over: list[bool] = [Path(stop).exists() or time.monotonic() > deadline]
            dist.broadcast_object_list(over, 0)
            if over[0]:
                break
        time.sleep(0.01)
    return {
        "steps": (step, handle.step),
        "seen": seen,
        "equal": equal,
        "slowest": slowest,
        "frozen": handle.frozen,
    }


def _until(what: str, condition: Any, seconds: float = 15.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OperatorError):
            if value := condition():
                return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def _label(client: OperatorClient) -> str:
    detail = client.run(RUN)
    plan = detail.plan
    # The plan is in force once the ranks report under it.
    return detail.summary.plan_label if plan is not None else ""


def test_no_step_is_lost_the_plan_stays_and_decisions_resume_higher(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with _controller(tmp_path) as controller, ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_ranks, _train, 4, controller.address, str(stop))
        try:
            with OperatorClient(controller.address) as client:
                _until("the run is known", lambda: client.run(RUN).layout)
                client.pin(RUN.run, "", TOPK)
                _until("topk in force", lambda: "topk" in _label(client))
                time.sleep(1.0)
            controller.kill()
            time.sleep(2.0)
            controller.start()
            with OperatorClient(controller.address) as client:
                _until("all ranks are back", lambda: client.run(RUN).summary.ranks == 4)
                _until("the layout is known", lambda: client.run(RUN).layout)
                client.pin(RUN.run, "", BF16)
                _until("bf16 in force", lambda: "bf16" in _label(client))
                time.sleep(1.5)
        finally:
            stop.touch()
        results = ranks.result(60)
    for result in results:
        assert result["frozen"] == ""
        assert result["equal"]
        assert result["steps"][0] == result["steps"][1]
        assert result["slowest"] < 2.0, "no step waited for the controller"
        assert result["seen"] == results[0]["seen"]
        labels = [label for _, _, label in result["seen"]]
        assert labels[-2:] == [TOPK.label, BF16.label]
        (_, before, _), (_, after, _) = result["seen"][-2:]
        assert after[0] > before[0], "the term of the restarted controller is higher"
        assert after[1] > before[1], "and so is the id of its plan"

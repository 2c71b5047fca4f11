"""A real controller dies by SIGKILL in the middle of a run and comes back."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradpilot.operate import OperatorClient
from gradpilot.protos.messages import BF16, Option, RunRef
from gradpilot.worker_agent.agent import attach
from tests.controller_process import running_controller, until
from tests.ranks import run_ranks
from tests.worker_agent import training

pytestmark = pytest.mark.processes

TOPK = Option("topk", 0.1, "allgather")
RUN = RunRef("loss-test")


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


def _label(client: OperatorClient) -> str:
    detail = client.run(RUN)
    plan = detail.plan
    # The plan is in force once the ranks report under it.
    return detail.summary.plan_label if plan is not None else ""


def test_no_step_is_lost_the_plan_stays_and_decisions_resume_higher(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with running_controller(tmp_path) as controller, ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_ranks, _train, 4, controller.address, str(stop))
        try:
            with OperatorClient(controller.address) as client:
                until("the run is known", lambda: client.run(RUN).layout)
                client.pin(RUN.run, "", TOPK)
                until("topk in force", lambda: "topk" in _label(client))
                time.sleep(1.0)
            controller.kill()
            time.sleep(2.0)
            controller.start()
            with OperatorClient(controller.address) as client:
                until("all ranks are back", lambda: client.run(RUN).summary.ranks == 4)
                until("the layout is known", lambda: client.run(RUN).layout)
                client.pin(RUN.run, "", BF16)
                until("bf16 in force", lambda: "bf16" in _label(client))
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

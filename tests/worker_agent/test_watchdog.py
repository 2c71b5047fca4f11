"""Ranks that get stuck in several ways: all leave dumps, the odd one is named, training goes on."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradpilot.diagnose import report
from gradpilot.protos.messages import Option
from gradpilot.worker_agent import watchdog
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.identity import Job, Place
from tests.ranks import run_ranks
from tests.worker_agent import training

RANKS = 3
ODD = 1
LIMIT_SECONDS = 0.8
STUCK_SECONDS = 2.0


def load_a_batch_for_ever() -> None:
    """Hold the interpreter's lock in C, so that no thread of Python's runs."""
    ctypes.PyDLL(None).system(f"sleep {STUCK_SECONDS}".encode())


def stop_for_a_while(pid: int) -> None:
    """Stop a process by SIGSTOP, and let it go on later whatever the caller does meanwhile."""
    subprocess.Popen(["sh", "-c", f"sleep {STUCK_SECONDS}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def _train(rank: int, folder: Path) -> dict[str, Any]:
    net = training.wrap()
    handle = attach(
        net,
        controller="off",
        run="stuck",
        start=Option("topk", 0.1, "allgather"),
        watchdog_seconds=LIMIT_SECONDS,
        dumps=str(folder / "now"),
    )
    pids: list[Any] = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())
    equal = True
    for step in range(30):
        if step == 10 and rank == ODD:
            load_a_batch_for_ever()
        if step == 20:
            dist.barrier()
            if rank == 0:
                shutil.copytree(folder / "now", folder / "in C")
                stop_for_a_while(pids[ODD])
        training.backward(net, rank, step)
        equal &= training.same_everywhere(training.digest(training.gradients(net)))
    watcher = handle._watchdog
    assert watcher is not None
    begun = time.monotonic()
    handle.close()
    return {
        "equal": equal,
        "steps": handle.step,
        "frozen": handle.frozen,
        "closing": time.monotonic() - begun,
        "watching": Path(f"/proc/{watcher.pid}").exists(),
    }


@pytest.mark.processes
def test_stuck_in_c_with_the_lock_and_stopped_by_a_signal(tmp_path: Path) -> None:
    results = run_ranks(_train, RANKS, tmp_path)
    for result in results:
        assert result["equal"]
        assert (result["steps"], result["frozen"], result["watching"]) == (30, "", False)
        assert result["closing"] < 2.0

    ((in_c,), bad) = report(tmp_path / "in C")
    assert bad == []
    assert in_c.odd == (ODD,)
    assert [f.kind for f in in_c.findings] == ["behind"]
    assert "it ended step 9 and has not begun the next" in in_c.verdict
    assert [dump.steps for dump in in_c.dumps] == [10] * RANKS
    assert "load_a_batch_for_ever" in in_c.dumps[ODD].threads[0].stack
    assert "_exchange" in "".join(t.stack for t in in_c.dumps[0].threads), "waits in a collective"
    assert "topk" in in_c.dumps[0].notes[-1].op

    ((stopped,), _) = report(tmp_path / "now")
    assert (stopped.odd, stopped.findings[0].kind) == ((ODD,), "stopped")
    assert stopped.dumps[ODD].threads[0].state == "T"
    assert len(stopped.dumps) == RANKS
    assert min(len(dump.notes) for dump in stopped.dumps) == 50


def start(seconds: float = 60.0) -> watchdog.Watchdog | None:
    job, place = Job("r", "1", "x"), Place("n", 0)
    return watchdog.start(seconds, "", job, place, model="m", rank=0, world_size=1)


def test_zero_means_none() -> None:
    assert start(0.0) is None


@pytest.mark.parametrize("lacking", ["a program", "memory", "the system call"])
def test_without_a_watcher_training_goes_on_with_a_warning(
    lacking: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("not here")

    watchdog._register_stacks()  # once for the process
    if lacking == "a program":
        monkeypatch.setattr(subprocess, "Popen", fails)
    elif lacking == "memory":
        monkeypatch.setattr(os, "posix_fallocate", fails)
    else:
        monkeypatch.delattr(os, "memfd_create")
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    assert start() is None
    assert "no watchdog" in caplog.text
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_a_forked_child_leaves_the_watcher_alone() -> None:
    guard = start()
    assert guard is not None
    guard._pid += 1
    guard.close()
    assert Path(f"/proc/{guard.pid}").exists()
    guard._pid -= 1
    guard.close()
    assert not Path(f"/proc/{guard.pid}").exists()


def test_a_signal_that_somebody_else_uses_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_stacks", None)
    monkeypatch.setattr(signal, "getsignal", lambda number: print)
    assert watchdog._register_stacks() == -1

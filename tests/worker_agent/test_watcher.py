"""The watcher by itself: when it speaks up, and what it leaves of a process that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradpilot.worker_agent import flight_recorder, watcher
from gradpilot.worker_agent.dump import ENDED, read
from gradpilot.worker_agent.flight_recorder import Flight, Note
from gradpilot.worker_agent.watcher import Stall

LIMIT = 20.0

# A rank as far as the watcher knows it; says the watcher's process id, then does as it is told.
RANK = """
import ctypes, os, signal, sys, threading, time
from types import SimpleNamespace as Thing
from gradpilot.worker_agent import watchdog
from gradpilot.worker_agent.identity import Job, Place
guard = watchdog.start(float(sys.argv[2]), sys.argv[1], Job("run", "001", "x"), Place("node", 0),
                       model="model", rank=0, world_size=1)
tensor = Thing(numel=lambda: 10, element_size=lambda: 4)
def bucket(step):
    guard.flight.note(tensor, step, Thing(index=0, key="b"), Thing(label="none"), Thing(key=(1, 2)))
print(guard.pid, flush=True)
"""


def run(folder: Path, seconds: float, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK + script, str(folder), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def over(process: subprocess.Popen[str]) -> tuple[int, int, str]:
    """Return the watcher's id, the exit code and stderr, after the watcher has ended, too."""
    try:
        # The watcher has the same stderr: this waits for its end.
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return int(out.split()[0]), process.returncode, err


def gone(pid: int) -> bool:
    """Return whether a process ends within a moment; its parent may never ask for its result."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in ("Z", "X"):
            return True
        time.sleep(0.01)
    return False


def note(number: int) -> Note:
    return Note(number, number, 0, "b", "none", 4, 1, 1, 0.0, 1)


def flight(number: int, steps: int = 0) -> Flight:
    return Flight(steps, 0.0, False, (note(number),) if number else ())


def test_a_stall_is_found_once_and_again_after_progress() -> None:
    stall = Stall(1.0, 0.125)
    found = [stall.look(flight(1), 0.125) for _ in range(30)]
    assert found.index(True) == 8, "the first look only learns where the rank is"
    assert found.count(True) == 1
    assert not stall.look(flight(2), 0.125)
    assert sum(stall.look(flight(2), 0.125) for _ in range(30)) == 1
    assert not stall.look(flight(2, steps=1), 0.125), "the end of a step is progress, too"


def test_a_rank_that_is_being_set_up_has_not_stalled() -> None:
    stall = Stall(1.0, 0.1)
    assert not any(stall.look(flight(0), 0.1) for _ in range(50))


def test_a_machine_that_slept_has_not_stalled() -> None:
    stall = Stall(1.0, 0.1)
    stall.look(flight(1), 0.1)
    assert not stall.look(flight(1), 3600.0)


@pytest.mark.processes
def test_a_killed_rank_leaves_what_it_did_last(tmp_path: Path) -> None:
    script = "[bucket(s) for s in range(70)]; guard.flight.end_step(69)\n"
    pid, code, err = over(run(tmp_path, 60, script + "os.kill(os.getpid(), signal.SIGKILL)"))
    assert (code, err) == (-signal.SIGKILL, "")
    (path,) = tmp_path.rglob("*.json")
    dump = read(path)
    assert (dump.reason, dump.rank, dump.steps, dump.threads) == (ENDED, 0, 69, ())
    assert [n.step for n in dump.notes] == list(range(20, 70))
    assert dump.idle_seconds < LIMIT
    assert gone(pid)


@pytest.mark.processes
@pytest.mark.parametrize("script", ["bucket(0); guard.close()", "os._exit(0)"], ids=str.split)
def test_a_good_end_and_one_before_the_first_step_leave_nothing(
    tmp_path: Path, script: str
) -> None:
    pid, code, err = over(run(tmp_path, 60, script))
    assert (code, err) == (0, "")
    assert list(tmp_path.iterdir()) == []
    assert gone(pid)


@pytest.mark.processes
def test_frames_come_from_a_thread_in_c_that_holds_the_lock_and_from_others(tmp_path: Path) -> None:
    """And one line on stderr says where all of that is."""
    script = """
def in_python():
    bucket(0)
    time.sleep(60)
def in_c():
    ctypes.PyDLL(None).system(b"sleep 2")  # unlike CDLL it keeps the interpreter's lock
threading.Thread(target=in_python, daemon=True).start()
time.sleep(0.2)
in_c()
guard.close()
"""
    _, code, err = over(run(tmp_path, 0.5, script))
    (path,) = tmp_path.rglob("*.json")
    main, other = read(path).threads
    assert (main.name, other.name) == ("main", "hook")
    assert "in in_c" in main.stack
    assert "in in_python" in other.stack
    assert "in_c" not in other.stack
    assert code == 0
    assert err.count("\n") == 1
    assert f"gradpilot diagnose {path.parent}" in err


@pytest.mark.processes
def test_a_folder_that_cannot_be_written_is_said_and_does_no_harm(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    _, code, err = over(run(blocked, 0.5, "bucket(0); time.sleep(1.2); guard.close()"))
    assert code == 0
    assert "the dump of rank 0 cannot be written" in err


@pytest.mark.processes
def test_a_signal_that_nobody_catches_is_never_sent() -> None:
    assert watcher._catches(os.getpid(), signal.SIGINT)
    assert not watcher._catches(os.getpid(), signal.SIGRTMAX)
    assert not watcher._catches(1 << 30, signal.SIGINT)


def test_looking_is_cheap_for_a_long_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a second at most; ten times within a short limit."""
    waits: list[float] = []
    closed = Flight(-1, 0.0, True, ())
    flights = iter([flight(1), closed, flight(1), closed])
    monkeypatch.setattr(flight_recorder, "read", lambda fd: next(flights))
    monkeypatch.setattr(watcher._End, "wait", lambda self, seconds: waits.append(seconds))
    orders = {"stacks": -1, "signal": 0, "parent": os.getpid(), "folder": "", "prune": False}
    names = {"tell": False, "run": "", "incarnation": "", "model": "", "node": "", "threads": {}}
    for seconds in (300.0, 2.0):
        watcher.watch(
            watcher.Orders(flight=-1, seconds=seconds, rank=0, world_size=1, **orders, **names)  # type: ignore[arg-type]
        )
    assert waits == [1.0, 1.0, 0.2, 0.2]

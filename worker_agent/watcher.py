"""The process that watches one rank from outside: run by ``watchdog``, one for each model.

It looks at the rank's flight recorder several times before the limit is over. If nothing has
changed for so long, or if the rank has ended without closing its handle, it writes a dump. It never
touches the rank but for one signal to each thread whose Python frames it wants, after making sure
that the rank catches that signal.

Needs the standard library only; starts in a few hundredths of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gradpilot.worker_agent import flight_recorder
from gradpilot.worker_agent.dump import ENDED, STALLED, Dump, Thread, write
from gradpilot.worker_agent.flight_recorder import Flight

LONGEST_LOOK_SECONDS = 1.0
STACK_SECONDS = 0.5
"""How long a thread may take to write its frames; in the kernel it may not be able to."""
_QUIET_SECONDS = 0.02
_LONGEST_STACK = 1 << 16


@dataclass(frozen=True, slots=True)
class Orders:
    """What the watcher is told.

    Attributes:
        flight: File descriptor of the flight recorder's memory.
        stacks: File descriptor that the rank writes frames to; -1 if it does not.
        signal: Signal that makes a thread of the rank do so.
        parent: Process id of the rank.
        seconds: Time without progress that makes a stall.
        folder: Folder for dumps.
        prune: Whether old ones are removed from it.
        tell: Whether to say so on stderr: one rank a machine does.
        run: See ``Dump``, as for the next four.
        incarnation: Id of this start.
        model: Name of the model.
        rank: Rank.
        world_size: Number of ranks.
        node: Host name.
        threads: Names of gradpilot's own threads, by id as text.
    """

    flight: int
    stacks: int
    signal: int
    parent: int
    seconds: float
    folder: str
    prune: bool
    tell: bool
    run: str
    incarnation: str
    model: str
    rank: int
    world_size: int
    node: str
    threads: dict[str, str]


class Stall:
    """Says when there has been no progress for too long.

    Time is counted as the watcher's own looks at the rank, each for no more than twice the wanted
    interval: a machine that was suspended, or a job that was stopped as a whole and the watcher
    with it, has not stalled. A rank that has not yet handed a bucket over is still being set up.

    Args:
        seconds: The limit.
        interval: Seconds between two looks.
    """

    def __init__(self, seconds: float, interval: float) -> None:
        self._seconds, self._interval = seconds, interval
        self._progress: tuple[int, int] | None = None
        self._idle = 0.0
        self._told = False

    def look(self, flight: Flight, passed: float) -> bool:
        """Return whether this look finds a stall; once for each.

        Args:
            flight: What the recorder holds.
            passed: Seconds since the last look.
        """
        if not flight.notes or flight.progress != self._progress:
            self._progress, self._idle, self._told = flight.progress, 0.0, False
            return False
        self._idle += min(passed, 2 * self._interval)
        if self._told or self._idle < self._seconds:
            return False
        self._told = True
        return True


def watch(orders: Orders) -> None:
    """Watch until the rank closes its handle or ends."""
    interval = min(LONGEST_LOOK_SECONDS, orders.seconds / 10)
    stall = Stall(orders.seconds, interval)
    end = _End(orders.parent)
    last = time.monotonic()
    while True:
        ended = end.wait(interval)
        flight = flight_recorder.read(orders.flight)
        if flight.closed:
            return
        if ended:
            if flight.notes:
                _leave(orders, flight, ENDED, ())
            return
        now = time.monotonic()
        stalled = stall.look(flight, now - last)
        last = now
        if stalled:
            path = _leave(orders, flight, STALLED, threads(orders, flight))
            if path is not None and orders.tell:
                _say(
                    f"no synchronised backward pass of {orders.model!r} for {orders.seconds:g} s,"
                    f" step {flight.steps}; what the ranks of this machine do is in {path.parent}:"
                    f" gradpilot diagnose {path.parent}"
                )


def threads(orders: Orders, flight: Flight) -> tuple[Thread, ...]:
    """Return the threads that matter, with their Python frames as far as they can be had.

    They are asked one after another, each for its own frames: those of a thread that is running
    meanwhile could change while they are read, and a false alarm must not endanger a healthy job.
    """
    names = {orders.parent: "main"}
    names.update({int(tid): name for tid, name in orders.threads.items()})
    for note in flight.notes:
        names.setdefault(note.thread, "hook")
    catches = orders.stacks >= 0 and _catches(orders.parent, orders.signal)
    found = []
    for tid, name in names.items():
        task = Path(f"/proc/{orders.parent}/task/{tid}")
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        try:
            waits_in = (task / "wchan").read_text().strip()
        except OSError:
            waits_in = ""
        stack = ""
        if catches and state not in ("T", "t", "Z", "X") and os.getppid() == orders.parent:
            stack = _stack(orders, tid)
        found.append(Thread(tid, name, state, "" if waits_in == "0" else waits_in, stack))
    return tuple(found)


class _End:
    """Waits for the end of a process: at once where the kernel can tell, else by looking."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._fd = -1
        with contextlib.suppress(AttributeError, OSError):
            self._fd = os.pidfd_open(parent)

    def wait(self, seconds: float) -> bool:
        """Return whether it has ended, after so many seconds at most."""
        if self._fd < 0:
            time.sleep(seconds)
        else:
            select.select([self._fd], [], [], seconds)
        return os.getppid() != self._parent


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, which would end it otherwise."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(int(x.split()[1], 16) for x in lines if x.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return False
    return bool(caught >> (number - 1) & 1)


def _stack(orders: Orders, tid: int) -> str:
    before = os.fstat(orders.stacks).st_size
    try:
        if ctypes.CDLL(None).tgkill(orders.parent, tid, orders.signal):
            return ""
    except AttributeError:  # a C library without it can ask the main thread only
        if tid != orders.parent:
            return ""
        os.kill(tid, orders.signal)
    deadline = time.monotonic() + STACK_SECONDS
    size, quiet_since = before, 0.0
    while (now := time.monotonic()) < deadline:
        if (newest := os.fstat(orders.stacks).st_size) != size:
            size, quiet_since = newest, now
        elif size > before and now - quiet_since >= _QUIET_SECONDS:
            break
        time.sleep(0.002)
    text = os.pread(orders.stacks, min(size - before, _LONGEST_STACK), before)
    return text.decode(errors="replace")


def _leave(orders: Orders, flight: Flight, reason: str, found: tuple[Thread, ...]) -> Path | None:
    dump = Dump(
        run=orders.run,
        incarnation=orders.incarnation,
        model=orders.model,
        rank=orders.rank,
        world_size=orders.world_size,
        node=orders.node,
        pid=orders.parent,
        reason=reason,
        at=time.time(),
        idle_seconds=time.monotonic() - flight.last_seconds,
        steps=flight.steps,
        notes=flight.notes,
        threads=found,
    )
    try:
        return write(dump, Path(orders.folder), prune=orders.prune)
    except OSError as error:
        _say(f"the dump of rank {orders.rank} cannot be written: {error}")
        return None


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"gradpilot: {text}\n")
        sys.stderr.flush()


def main(argv: list[str]) -> None:
    """Run the watcher; ``argv`` is the orders as one JSON object."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)
    watch(Orders(**json.loads(argv[0])))

"""Notices that a rank no longer gets on, by means that need nothing of the rank.

A rank that hangs often cannot help itself: its main thread sits in a C call, perhaps with the
interpreter's lock, perhaps stopped by a signal. So each model has a *watcher*, a small process that
shares the memory of the flight recorder and writes a dump when there is no synchronised backward
pass for ``watchdog_seconds``. What was considered and not taken:

- A thread in Python does not run while another thread holds the interpreter's lock.
- ``faulthandler.dump_traceback_later`` has a thread in C, but a process has only one such timer,
  which belongs to the user (and to pytest); arming it again starts a thread each time; it stops
  with the process; and it reads the frames of threads that may be running, which is meant for
  processes that are about to end, not for a job that only evaluates for a while.
- A timer signal (``setitimer``) interrupts system calls of the user's program all the time, and
  does not fire in a stopped process.
- A process group's own timeout ends the job instead of explaining it, and does not always fire.
- One watcher for all ranks of a machine would have to find them, and would end with its own rank.

Frames come from a handler of ``faulthandler`` on a real-time signal that nobody else uses, which
runs in C on whatever thread it is sent to, with or without the lock. It stays for as long as the
process lives, as a late signal would end a process without it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import gradpilot
from gradpilot.worker_agent.dump import default_folder
from gradpilot.worker_agent.flight_recorder import FlightRecorder
from gradpilot.worker_agent.identity import Job, Place
from gradpilot.worker_agent.watcher import Orders

log = logging.getLogger("gradpilot.agent")

STACK_SIGNAL = signal.SIGRTMAX - 3
_END_SECONDS = 0.3
"""How long the exit waits for the watcher, which has been told to end."""

_BOOTSTRAP = """
import sys
sys.path.append(sys.argv[1])
from gradpilot.worker_agent.watcher import main
main(sys.argv[2:])
"""

_stacks: int | None = None


class Watchdog:
    """The watcher of one model on one rank, as the rank sees it.

    Attributes:
        flight: The flight recorder; the gradient path writes to it.
    """

    def __init__(self, flight: FlightRecorder, process: subprocess.Popen[bytes]) -> None:
        self.flight = flight
        self._process = process
        self._pid = os.getpid()

    @property
    def pid(self) -> int:
        """Return the watcher's process id."""
        return self._process.pid

    def close(self) -> None:
        """End the watcher; does nothing in a forked child of the rank."""
        if os.getpid() != self._pid:
            return
        self.flight.close()
        with contextlib.suppress(OSError):
            self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start(
    seconds: float,
    folder: str,
    job: Job,
    place: Place,
    *,
    model: str,
    rank: int,
    world_size: int,
) -> Watchdog | None:
    """Start the watcher of a model; returns at once.

    Args:
        seconds: Time without progress that makes a stall; 0 for no watcher.
        folder: Folder for dumps; "" for ``dump.default_folder``.
        job: The job.
        place: Where this rank runs.
        model: Name of the model.
        rank: Rank in the group of the model.
        world_size: Ranks in that group.

    Returns:
        The watcher, or None if there is none; why is logged, and training goes on.
    """
    if not seconds:
        return None
    flight: FlightRecorder | None = None
    try:
        flight = FlightRecorder()
        stacks = _register_stacks()
        orders = Orders(
            flight=flight.fd,
            stacks=stacks,
            signal=STACK_SIGNAL,
            parent=os.getpid(),
            seconds=seconds,
            folder=str(Path(folder).absolute() if folder else default_folder()),
            prune=not folder,
            tell=place.local_rank == 0,
            run=job.run,
            incarnation=job.incarnation,
            model=model,
            rank=rank,
            world_size=world_size,
            node=place.node,
            threads={
                str(thread.native_id): thread.name
                for thread in threading.enumerate()
                if thread.name.startswith("gradpilot-")
            },
        )
        root = str(Path(gradpilot.__file__).resolve().parent.parent)
        process = subprocess.Popen(
            # Without the site's packages, which it does not need: it starts three times as fast.
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, root, json.dumps(asdict(orders))],
            pass_fds=[fd for fd in (flight.fd, stacks) if fd >= 0],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # what ends the rank's group must not end what reports on it
        )
    except (OSError, ValueError, AttributeError) as error:
        if flight is not None:
            flight.close()
        # As text: a log record that is kept would keep this frame, and the memory, through it.
        log.warning("no watchdog, a job that hangs will leave no dumps: %s", str(error))
        return None
    return Watchdog(flight, process)


def _register_stacks() -> int:
    """Make ``STACK_SIGNAL`` write the frames of its thread; once in a process.

    Returns:
        File descriptor of anonymous memory that they go to; -1 if the signal is taken.
    """
    global _stacks
    if _stacks is None:
        if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:
            _stacks = -1
        else:
            _stacks = os.memfd_create("gradpilot-stacks")
            faulthandler.register(STACK_SIGNAL, _stacks, all_threads=False)
    return _stacks

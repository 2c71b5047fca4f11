"""A helper process of a lab: how it detaches, takes requests, and never outlives its lab.

A helper is started as ``python -m bench.netlab.KIND NAME HOSTS MTU``. That command returns when the
helper is ready, or with the reason why it is not; the helper itself goes on in the background.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.netlab import names
from bench.netlab.processes import Process
from bench.netlab.system import libc

WATCH_SECONDS = 1.0
"""How often a helper looks whether its lab is still there."""

REQUEST_BYTES = 1 << 16
_PR_SET_TIMERSLACK = 29
_LOCK_MEMORY = 3  # what there is and what will be


class Work(Protocol):
    """What a helper does between requests."""

    def sockets(self) -> Sequence[int]:
        """Return the descriptors to wait for."""

    def wake_at(self) -> float | None:
        """Return when there is something to do, by the monotonic clock; None for never."""

    def step(self, ready: Sequence[int]) -> None:
        """Do what is due, and take what came."""

    def request(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request and return the answer; an exception is told to who asked."""


def main(kind: str, make: Callable[[str, int, int], Work], arguments: Sequence[str]) -> int:
    """Start a helper in the background; returns in the process that was called, with its status.

    Args:
        kind: Which helper: its module's name.
        make: Gives its work, from the lab's name, number of hosts and MTU.
        arguments: These three, as text.
    """
    name, hosts, mtu = arguments[0], int(arguments[1]), int(arguments[2])
    hears, tells = os.pipe()
    if os.fork():
        os.close(tells)
        with os.fdopen(hears) as pipe:
            word = pipe.read()
        if word != "ready":
            print(word or "it ended without a word", file=sys.stderr)
        return int(word != "ready")
    os.close(hears)
    os.setsid()
    os.chdir("/")
    try:
        work = make(name, hosts, mtu)
        _detach(names.log_file(name, kind))
        control = _listen(names.socket_file(name, kind))
        me = Process.of(os.getpid())
        assert me is not None
        me.write(names.pid_file(name, kind))
    except BaseException as error:
        os.write(tells, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(tells, b"ready")
    os.close(tells)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        _loop(work, control, names.NAMESPACES / names.hub(name))
    finally:
        names.socket_file(name, kind).unlink(missing_ok=True)
    return 0


def go_first(priority: int) -> bool:
    """Put this process before all ordinary ones, its memory never on disk.

    What computes on the hosts must not hold up packets; a helper uses little time and gives way.

    Returns:
        Whether the system allows it; some containers do not, and the helper is then late at times.
    """
    libc.mlockall(_LOCK_MEMORY)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    except OSError:
        return False
    return True


def _detach(log: Path) -> None:
    """Give up the caller's files, so that who waits for them is not kept waiting."""
    null = os.open(os.devnull, os.O_RDWR)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target, source in ((0, null), (1, out), (2, out)):
        os.dup2(source, target)
    libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # wake within 1 us of the time asked for, not 50


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.bind(str(path))
    control.setblocking(False)
    return control


def _loop(work: Work, control: socket.socket, lab: Path) -> None:
    identity, asked = os.stat(lab).st_ino, control.fileno()
    watch = time.monotonic() + WATCH_SECONDS
    while True:
        due = work.wake_at()
        until = watch if due is None else min(due, watch)
        pause = max(0.0, until - time.monotonic())
        ready: list[int] = select.select([*work.sockets(), asked], [], [], pause)[0]
        if asked in ready:
            ready.remove(asked)
            _answer(work, control)
        work.step(ready)
        if time.monotonic() >= watch:
            watch = time.monotonic() + WATCH_SECONDS
            try:
                if os.stat(lab).st_ino != identity:
                    return
            except FileNotFoundError:
                return


def _answer(work: Work, control: socket.socket) -> None:
    try:
        data, peer = control.recvfrom(REQUEST_BYTES)
    except BlockingIOError:
        return
    try:
        answer = work.request(json.loads(data))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    if peer:
        try:
            control.sendto(json.dumps(answer).encode(), peer)
        except OSError as error:
            print(f"nobody takes the answer: {error}", file=sys.stderr, flush=True)

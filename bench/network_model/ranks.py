"""N ranks that time collectives: each on an emulated host, or all on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from bench._processes import MASTER_PORT, environment
from bench.netlab import Lab
from bench.network_model.job import write

END_SECONDS = 30.0
POLL_SECONDS = 0.02


class RanksFailedError(Exception):
    """A rank failed or did not answer; the message has its last words."""


class Run(NamedTuple):
    """One collective to be timed.

    Attributes:
        kind: One of ``messages.COLLECTIVES``.
        skip: Steps of our own all-reduce left out.
        bytes: What one rank hands in.
    """

    kind: str
    skip: int
    bytes: int


class Timed(NamedTuple):
    """One collective that was timed.

    Attributes:
        seconds: From the first rank's beginning to the last one's end.
        spread: Between the first and the last beginning, seconds.
        sent: Bytes that each rank sent, with headers.
    """

    seconds: float
    spread: float
    sent: tuple[int, ...]


class Ranks:
    """Processes that do what ``order`` says; a context manager that ends them.

    Args:
        ranks: Ranks N.
        lab: Where, a host each; None for all on this machine, over loopback.
        seconds: After this time the ranks end themselves, whatever happens.
    """

    def __init__(self, ranks: int, lab: Lab | None, seconds: float) -> None:
        self._ranks, self._lab, self._seconds = ranks, lab, seconds
        self._processes: list[subprocess.Popen[str]] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="ranks-")
        self._folder = Path(self._scratch.name)
        self._orders = 0

    def __enter__(self) -> Self:
        try:
            np.zeros(self._ranks, np.int64).tofile(self._folder / "arrivals")
            address, port, interface = "127.0.0.1", _free_port(), "lo"
            if self._lab is not None:
                address, port, interface = self._lab.address(0), MASTER_PORT, "eth0"
            for rank in range(self._ranks):
                self._start(rank, address, port, interface)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                write(self._folder / f"order-{self._orders}.json", None)
                self._wait(lambda: all(p.poll() == 0 for p in self._processes), END_SECONDS)
        finally:
            self._end()

    def time(self, runs: Sequence[Run], seconds: float, pause: float = 0.0) -> list[Timed]:
        """Have collectives done one after the other and return how long each took.

        Args:
            runs: What is done, in this order.
            seconds: How long that may take.
            pause: Seconds of rest before each.

        Raises:
            RanksFailedError: A rank failed, or it took longer.
        """
        number, self._orders = self._orders, self._orders + 1
        write(self._folder / f"order-{number}.json", {"runs": list(runs), "pause": pause})
        replies = [self._folder / f"reply-{number}-{rank}.json" for rank in range(self._ranks)]
        self._wait(lambda: all(reply.exists() for reply in replies), seconds)
        told = [json.loads(reply.read_text(encoding="utf-8")) for reply in replies]
        return [_together(of_ranks) for of_ranks in zip(*told, strict=True)]

    def _start(self, rank: int, address: str, port: int, interface: str) -> None:
        argv = [sys.executable, "-m", "bench.network_model.job", "--folder", str(self._folder)]
        argv += ["--seconds", str(self._seconds), "--interface", interface]
        env = {
            **environment(),
            "RANK": str(rank),
            "WORLD_SIZE": str(self._ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": interface,
        }
        with (self._folder / f"rank{rank}.log").open("w", encoding="utf-8") as log:
            if self._lab is None:
                process = subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, text=True, start_new_session=True,
                )  # fmt: skip
            else:
                process = self._lab.popen(
                    rank, argv, env=env, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT,
                )  # fmt: skip
        self._processes.append(process)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            for rank, process in enumerate(self._processes):
                if process.poll():
                    words = self._last_words(rank)
                    raise RanksFailedError(f"rank {rank} ended with {process.poll()}: {words}")
            if time.monotonic() > deadline:
                words = "; ".join(self._last_words(rank) for rank in range(self._ranks))
                raise RanksFailedError(f"no answer of all ranks within {seconds:.0f} s: {words}")
            time.sleep(POLL_SECONDS)

    def _last_words(self, rank: int) -> str:
        text = (self._folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
        return " | ".join(text.strip().splitlines()[-3:])[-400:] or "(nothing)"

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_SECONDS)
        self._scratch.cleanup()


def _together(of_ranks: Sequence[Sequence[float]]) -> Timed:
    begun, ended, sent = zip(*of_ranks, strict=True)
    return Timed(max(ended) - min(begun), max(begun) - min(begun), tuple(int(s) for s in sent))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

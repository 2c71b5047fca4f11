"""The processes of a row: a rank on every host, and a controller on the first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from bench._processes import MASTER_PORT, environment
from bench.netlab import Lab
from bench.tta.methods import Method

GRPC_PORT, HTTP_PORT = 47800, 47801
"""The lab's addresses are its own, so fixed ports meet nobody."""

START_SECONDS = 60.0
END_SECONDS = 20.0
POLL_SECONDS = 0.02


class RowFailedError(Exception):
    """A row did not come to a good end; the message says what a process said last."""


class Processes:
    """Processes in a lab; a context manager that ends them.

    Args:
        lab: Where.
        folder: For their output.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        self._ranks: list[subprocess.Popen[str]] = []
        self._controller: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in (*self._ranks, *([self._controller] if self._controller else [])):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_SECONDS)

    def start_controller(self, method: Method) -> str:
        """Start the controller of a method and return its address once it serves.

        Like an embedded one it runs beside rank 0 and gives way to it; the other ranks reach it
        over the links that the row is about.
        """
        address = f"{self._lab.address(0)}:{GRPC_PORT}"
        ready = self._folder / "controller.json"
        argv = [
            *("nice", "-n", "5", sys.executable, "-m", "gradpilot.controller"),
            *("--grpc-address", address, "--http-address", f"127.0.0.1:{HTTP_PORT}", "--insecure"),
            *("--state", str(self._folder / "controller.sqlite3"), "--ready-file", str(ready)),
            *("--policy", method.policy, *method.arguments),
        ]
        self._controller = self._start(0, "controller", argv, {})
        self.wait_for(ready.exists, START_SECONDS, "the controller to serve")
        return address

    def start_ranks(self, ranks: int) -> None:
        """Start all ranks; their settings lie in the folder."""
        for rank in range(ranks):
            argv = [sys.executable, "-m", "bench.tta.job", "--folder", str(self._folder)]
            names = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": self._lab.address(0),
                "MASTER_PORT": str(MASTER_PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            self._ranks.append(self._start(rank, f"rank{rank}", argv, names))

    @property
    def pids(self) -> list[int]:
        """Return the numbers of all processes."""
        every = (*self._ranks, *([self._controller] if self._controller else []))
        return [process.pid for process in every]

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until a condition holds.

        Raises:
            RowFailedError: A process failed before, or it takes too long.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self._raise_failure()
            if time.monotonic() > deadline:
                raise RowFailedError(f"waited {seconds:.0f} s for {what}; {self._last_words()}")
            time.sleep(POLL_SECONDS)

    def wait_for_end(self, seconds: float) -> None:
        """Wait until all ranks have ended well.

        Raises:
            RowFailedError: One did not.
        """
        self.wait_for(
            lambda: all(process.poll() == 0 for process in self._ranks), seconds, "the ranks to end"
        )

    def _start(
        self, host: int, name: str, argv: list[str], more: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        with (self._folder / f"{name}.log").open("w", encoding="utf-8") as log:
            return self._lab.popen(
                host,
                argv,
                env={**environment(), **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _raise_failure(self) -> None:
        named = [(f"rank {i}", process) for i, process in enumerate(self._ranks)]
        if self._controller is not None:
            named.append(("the controller", self._controller))
        for name, process in named:
            ended = process.poll()
            if ended or (ended == 0 and process is self._controller):
                raise RowFailedError(f"{name} ended with {ended}; {self._last_words()}")

    def _last_words(self) -> str:
        found = []
        for log in sorted(self._folder.glob("*.log")):
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            if lines:
                found.append(f"{log.stem}: {' | '.join(lines[-3:])[-400:]}")
        return "; ".join(found) or "no process wrote anything"

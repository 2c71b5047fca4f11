"""A controller in a process of its own, as an operator would run it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradpilot.operate import OperatorError
from tests.ranks import free_port


class Controller:
    """A controller process with a state file and fixed ports, so that it can be started again."""

    def __init__(self, folder: Path, interval: int) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._folder, self._http = folder, free_port()
        self._interval = interval
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it serves."""
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
                    *("--policy-settings.interval", str(self._interval)),
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
        """End it by SIGKILL."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        assert self._process.wait(5) == -signal.SIGKILL

    def stop(self) -> None:
        """End it by SIGTERM, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            assert self._process.wait(10) == 0


@contextlib.contextmanager
def running_controller(folder: Path, interval: int = 10) -> Iterator[Controller]:
    """Start a controller that takes no decisions of its own, and stop it at the end.

    Args:
        folder: For its state and log.
        interval: Decision step of its plans.
    """
    controller = Controller(folder, interval)
    controller.start()
    try:
        yield controller
    finally:
        controller.stop()


def until(what: str, condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """Wait until ``condition`` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OperatorError):
            if value := condition():
                return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")

"""Starts the ranks, follows what they tell, and sees to it that none stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import gradpilot
from gradpilot.demo.records import EVENTS_FILE, first_failure
from gradpilot.errors import GradpilotError

WORLD_SIZE = 4

LOG_FILE = "ranks.log"

END_SECONDS = 10.0
"""How long torchrun gets to end its ranks before it is killed; they then end by themselves."""

POLL_SECONDS = 0.1

_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_CONTROLLER = {
    # Quicker than the defaults, since a phase of the demo lasts seconds.
    "GRADPILOT_CTL_REPORT_SECONDS": "0.5",
    "GRADPILOT_CTL_MIN_DECISION_SECONDS": "0.5",
    "GRADPILOT_CTL_POLICY_SETTINGS__INTERVAL": "5",
    "GRADPILOT_CTL_POLICY_SETTINGS__DWELL_STEPS": "10",
    # Some hundred steps leave no time to make up for what strong compression delays.
    "GRADPILOT_CTL_POLICY_SETTINGS__GAIN_FLOOR": "0.5",
    # A few looks of warm-up fit in, at a few steps each.
    "GRADPILOT_CTL_POLICY_SETTINGS__TRIAL_STEPS": "10",
    "GRADPILOT_CTL_POLICY_SETTINGS__BLACKLIST_STEPS": "200",
    # Steadier: four ranks share a few cores with the controller, so costs waver.
    "GRADPILOT_CTL_POLICY_SETTINGS__MIN_IMPROVEMENT": "0.1",
}

_NO_WARM_UP = {"GRADPILOT_CTL_POLICY_SETTINGS__WARM_FLOOR": "0.0"}
"""For a run that would be over before warm-up is, so that nothing would be compressed."""


class DemoFailedError(GradpilotError):
    """The ranks did not come to a good end."""


class Ranks:
    """The ranks as one torchrun; a context manager that ends them.

    Args:
        folder: Where settings lie and records appear.
        deadline: Seconds after which the ranks end themselves.
        warm_up: Whether the floor of gain is higher while training is young.
    """

    def __init__(self, folder: Path, deadline: float, warm_up: bool = True) -> None:
        self._folder = folder
        self._deadline = time.monotonic() + deadline + 2 * END_SECONDS
        root = str(Path(gradpilot.__file__).resolve().parent.parent)
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", str(WORLD_SIZE)),
            *("-m", "gradpilot.demo.train"),
            *("--folder", str(folder), "--deadline", str(deadline)),
        ]
        (folder / EVENTS_FILE).touch()
        with (folder / LOG_FILE).open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=_environment(os.environ, root) | ({} if warm_up else _NO_WARM_UP),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the command, which then ends the ranks
            )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # torchrun ends its ranks, then itself
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_SECONDS)

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield what rank 0 tells until all ranks have ended well; None when nothing is new.

        Raises:
            DemoFailedError: A rank failed, or it takes too long; the message says why.
        """
        with (self._folder / EVENTS_FILE).open(encoding="utf-8") as file:
            partial = ""
            while True:
                ended = self._process.poll()  # before reading, so that the last events are read
                for line in file.read().splitlines(keepends=True):
                    partial += line
                    if partial.endswith("\n"):
                        yield json.loads(partial)
                        partial = ""
                if ended is not None:
                    break
                if time.monotonic() > self._deadline:
                    raise DemoFailedError(f"the ranks did not end in time{self._tail()}")
                yield None
                time.sleep(POLL_SECONDS)
        if ended != 0:
            raise DemoFailedError(f"the ranks failed (torchrun ended with {ended}){self._tail()}")

    def _tail(self, lines: int = 15) -> str:
        """Return what a rank left as its reason, else the last lines of the log."""
        if failure := first_failure(self._folder):
            return f": {failure}"
        text = (self._folder / LOG_FILE).read_text(encoding="utf-8", errors="replace")
        kept = text.strip().splitlines()[-lines:]
        return ":\n" + "\n".join(f"    {line}" for line in kept) if kept else "; they wrote nothing"


def _environment(env: Mapping[str, str], root: str) -> dict[str, str]:
    """Return the environment of the ranks, without what would lead them elsewhere."""
    kept = {
        name: value
        for name, value in env.items()
        if not name.startswith(("GRADPILOT_", "TORCHELASTIC_", "SLURM_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    path = os.pathsep.join(p for p in (root, env.get("PYTHONPATH", "")) if p)
    return {
        **kept,
        **_THREADS,
        **_CONTROLLER,
        "PYTHONPATH": path,
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "PYTHONUNBUFFERED": "1",
    }

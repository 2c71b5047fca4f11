"""Run a script under torchrun as a user would, with a time limit and a look at what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

MARK = "TORCHRUN_OF_THIS_TEST"
"""Variable by which the processes of a job are found, the embedded controller included."""

WRAPPER = ("-m", "gradpilot.worker_agent")


@dataclass(frozen=True)
class Ended:
    """A job that came to its end.

    Attributes:
        code: Exit code of torchrun: 0, or 1 if a rank failed.
        out: Standard output of all processes.
        err: Standard error of all processes.
        left: Processes that outlived it, ``pid: command``.
        folders: What gradpilot left in the temporary folder.
    """

    code: int
    out: str
    err: str
    left: tuple[str, ...]
    folders: tuple[str, ...]


def torchrun(
    folder: Path,
    *script: str,
    ranks: int,
    timeout: float,
    network: str = "",
    **env: str,
) -> Ended:
    """Run ``script`` with its arguments on so many ranks of this machine.

    Args:
        folder: Where the job may put temporary files.
        *script: ``train.py``, or ``-m`` and a module, and their arguments.
        ranks: Number of processes.
        timeout: Seconds after which all processes are killed and the test fails.
        network: Words of the shell that set up a network of its own for the job, as root; empty
            for the machine's.
        **env: Added to the environment.
    """
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    mark = uuid.uuid4().hex
    command = [*inside(network), sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, "--nproc-per-node", str(ranks), *script],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), MARK: mark, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(mark)
        out, err = process.communicate()
        raise AssertionError(f"not over within {timeout:.0f} s\n{out}\n{err}") from None
    left = _left(mark, seconds=5.0)
    _kill(mark)
    folders = tuple(sorted(path.name for path in temporary.glob("gradpilot-*")))
    return Ended(process.returncode, out, err, left, folders)


def inside(network: str) -> tuple[str, ...]:
    """Return what runs the command given after it in a network of its own; see ``torchrun``."""
    return ("unshare", "--net", "sh", "-ec", f'{network} exec "$0" "$@"') if network else ()


def _left(mark: str, seconds: float) -> tuple[str, ...]:
    """Return what still runs, after waiting so long for it to end."""
    deadline = time.monotonic() + seconds
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return tuple(f"{pid}: {command}" for pid, command in found.items())


def _kill(mark: str) -> None:
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> dict[int, str]:
    """Return the commands of all processes that carry the mark, by process id."""
    wanted, found = f"{MARK}={mark}".encode(), {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace")[:200]
    return found

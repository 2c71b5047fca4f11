"""Processes by number and start time: a number alone may be somebody else's by now."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

END_SECONDS = 3.0


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rsplit(")", 1)[1].split()  # the name before may hold anything


def identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, such as a namespace's; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@dataclass(frozen=True, slots=True)
class Process:
    """One process.

    Attributes:
        pid: Its number.
        started: When it started, in ticks since the machine did.
    """

    pid: int
    started: int

    @staticmethod
    def of(pid: int) -> Process | None:
        """Return the process of a number, if there is one that has not ended."""
        fields = _stat(pid)
        return None if fields is None or fields[0] == "Z" else Process(pid, int(fields[19]))

    @staticmethod
    def read(path: Path) -> Process | None:
        """Return the process that a pid file names, alive or not."""
        try:
            pid, started = path.read_text().split()
            return Process(int(pid), int(started))
        except (OSError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Write a pid file."""
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(f"{self.pid} {self.started}\n")
        os.replace(fresh, path)

    def alive(self) -> bool:
        """Return whether it is still this process."""
        return Process.of(self.pid) == self

    def cpu_seconds(self) -> float:
        """Return the processor time that it has used; NaN if it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9
        except OSError:
            return float("nan")

    def namespace(self) -> tuple[int, int] | None:
        """Return device and inode of its network namespace; None if it is gone."""
        return identity(Path(f"/proc/{self.pid}/ns/net"))

    def end(self, seconds: float = END_SECONDS, namespace: tuple[int, int] | None = None) -> bool:
        """End it: SIGTERM, and SIGKILL if it is still there after so many seconds.

        Args:
            seconds: How long to wait for it; 0 kills at once.
            namespace: Only if its network namespace is still that one (see ``identity``).

        Returns:
            Whether it was there.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            # The handle is of one process for ever, so what holds now holds for the signal.
            if not self.alive() or namespace not in (None, self.namespace()):
                return False
            for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, END_SECONDS)):
                if patience:
                    signal.pidfd_send_signal(handle, number)
                    if select.select([handle], [], [], patience)[0]:
                        break
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)
        return True


def within(namespace: Path) -> list[Process]:
    """Return the processes whose network namespace is that one."""
    wanted = identity(namespace)
    found = []
    for entry in os.listdir("/proc"):
        process = Process.of(int(entry)) if entry.isdecimal() else None
        if process is not None and wanted is not None and process.namespace() == wanted:
            found.append(process)
    return found

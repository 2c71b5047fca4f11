"""The lab's side of a helper process: start, ask, end."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from bench.netlab import names
from bench.netlab.errors import CommandError, HelperError
from bench.netlab.helper import REQUEST_BYTES
from bench.netlab.processes import Process
from bench.netlab.system import command

ANSWER_SECONDS = 5.0
_ROOT = Path(__file__).parents[2]


class Helper:
    """A helper process of a lab, there or not."""

    def __init__(self, name: str, kind: str) -> None:
        """Name it.

        Args:
            name: The lab.
            kind: ``delay`` or ``background``.
        """
        self._name, self._kind = name, kind

    def process(self) -> Process | None:
        """Return the process if it is alive."""
        process = Process.read(names.pid_file(self._name, self._kind))
        return process if process is not None and process.alive() else None

    def start(self, hosts: int, mtu: int) -> None:
        """Start it and wait until it is ready.

        Raises:
            HelperError: It does not start; the message has its own words.
        """
        # By path, not by what the caller happens to have installed or changed into.
        module = f"bench.netlab.{self._kind}"
        code = (
            f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
            f"from {module} import main; sys.exit(main())"
        )
        try:
            command([sys.executable, "-I", "-c", code, self._name, str(hosts), str(mtu)])
        except CommandError as error:
            raise HelperError(f"the {self._kind} process did not start: {error}") from error

    def ask(self, **fields: Any) -> dict[str, Any]:
        """Send it a request and return its answer.

        Raises:
            HelperError: It is not there, does not answer in time, or says that it cannot.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mine:
            mine.bind("")  # an abstract address of the kernel's choice: no file is left behind
            mine.settimeout(ANSWER_SECONDS)
            try:
                mine.sendto(
                    json.dumps(fields).encode(), str(names.socket_file(self._name, self._kind))
                )
                answer = json.loads(mine.recv(REQUEST_BYTES))
            except (OSError, ValueError) as error:
                raise HelperError(
                    f"the {self._kind} process of lab {self._name!r} does not answer ({error}); "
                    f"the lab is not usable: see {names.log_file(self._name, self._kind)}, "
                    "then take it down and up again"
                ) from error
        if "error" in answer:
            raise HelperError(f"the {self._kind} process refuses {fields}: {answer['error']}")
        return dict(answer)

    def end(self) -> None:
        """End it if it is alive, and remove its files."""
        process = Process.read(names.pid_file(self._name, self._kind))
        if process is not None and process.pid != os.getpid():
            process.end()
        for path in (
            names.pid_file(self._name, self._kind),
            names.socket_file(self._name, self._kind),
            names.log_file(self._name, self._kind),
        ):
            path.unlink(missing_ok=True)

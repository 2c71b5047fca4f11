"""What is kept of a lab between commands, and the lock that keeps commands apart."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from bench.netlab import names
from bench.netlab.errors import HelperError, NetlabError, NoLabError
from bench.netlab.link import Link
from bench.netlab.processes import identity

LOCK_SECONDS = 30.0


@dataclass(slots=True)
class State:
    """A lab as it was asked for.

    Attributes:
        name: Its name.
        mtu: Largest IP packet, bytes.
        congestion: TCP's congestion control on every host.
        links: One for each host.
        flows: Background traffic that is on: ``FROM-TO`` to Mbit/s.
        queued: Whether arrivals go through the delay process; once they do, they always will.
        machine_rtt_ms: Round trip without any delay, ms, found when arrivals were queued first; it
            is part of what is asked for, so the delays are shorter by it.
        complete: Whether it came up to the end.
    """

    name: str
    mtu: int
    congestion: str
    links: list[Link]
    flows: dict[str, float] = field(default_factory=dict)
    queued: bool = False
    machine_rtt_ms: float = 0.0
    complete: bool = False

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.links)

    @property
    def delays(self) -> list[float]:
        """What the delay process adds to whatever arrives at each host, s."""
        machine = self.machine_rtt_ms / 2e3
        return [max(0.0, link.one_way_seconds - machine) for link in self.links]

    def save(self) -> None:
        """Write it, whole or not at all."""
        path = names.state_file(self.name)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(fresh, path)

    @staticmethod
    def load(name: str) -> State:
        """Read it.

        Raises:
            NoLabError: There is no lab of that name, or only a part of one.
        """
        try:
            fields = json.loads(names.state_file(name).read_text())
            fields["links"] = [Link(**link) for link in fields["links"]]
            state = State(**fields)
        except FileNotFoundError:
            raise NoLabError(
                f"there is no lab {name!r}; make it: {_COMMAND} up --name {name}"
            ) from None
        except (ValueError, TypeError, KeyError) as error:
            raise NoLabError(
                f"{names.state_file(name)} cannot be read ({error}); "
                f"clear it away: {_COMMAND} down --name {name}"
            ) from error
        if not state.complete:
            raise NoLabError(
                f"lab {name!r} did not come up to the end; "
                f"clear it away: {_COMMAND} down --name {name}"
            )
        return state


_COMMAND = "python -m bench.netlab"


def make_run_folder() -> None:
    """Make the folder of all labs' files, for root alone.

    Raises:
        NetlabError: It is there but somebody else's.
    """
    names.RUN.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = names.RUN.stat().st_uid
    if owner != os.geteuid():
        raise NetlabError(f"{names.RUN} must belong to user {os.geteuid()}, but is user {owner}'s")


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep other commands off a lab; the kernel gives the lock back if this process dies.

    Raises:
        HelperError: Another command does not come to an end.
    """
    make_run_folder()
    path, deadline = names.lock_file(name), time.monotonic() + LOCK_SECONDS
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HelperError(
                        f"another command has changed lab {name!r} for {LOCK_SECONDS:g} s; "
                        f"fuser {path} names it"
                    ) from None
                time.sleep(0.02)
                continue
            # Whoever took the lab down removed the file that we waited for: then it is no lock.
            if identity(path) == (os.fstat(file.fileno()).st_dev, os.fstat(file.fileno()).st_ino):
                yield
                return

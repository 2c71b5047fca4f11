"""Taking a lab down, whatever is left of it."""

from __future__ import annotations

import os
from pathlib import Path

from bench.netlab import names
from bench.netlab.control import Helper
from bench.netlab.errors import BadRequestError, CommandError
from bench.netlab.processes import identity, within
from bench.netlab.state import locked
from bench.netlab.system import command, list_namespaces

KINDS = ("background", "delay")
_ROUNDS = 5
"""How often to look again for processes that were started while others were ended."""


def leftovers(name: str) -> list[str]:
    """Return what there is of a lab: namespaces, processes and files; empty if nothing."""
    found = [namespace for namespace in list_namespaces() if names.belongs(namespace, name)]
    found += [f"{kind} process" for kind in KINDS if Helper(name, kind).process() is not None]
    files = [names.state_file(name)]
    files += [of(name, kind) for kind in KINDS for of in (names.pid_file, names.socket_file)]
    return found + [str(path) for path in files if path.exists()]


def take_down(name: str) -> list[str]:
    """Remove everything that is left of a lab and return what that was.

    It ends the lab's helper processes (by number and start time) and whatever runs inside the lab's
    namespaces, nothing else. It needs no state of the lab and may be called at any time, twice too.

    Raises:
        BadRequestError: The caller is inside the lab.
        CommandError: Something cannot be removed.
    """
    names.valid_name(name)
    with locked(name):
        found = remove(name)
        names.lock_file(name).unlink(missing_ok=True)
    return found


def remove(name: str) -> list[str]:
    """Do what ``take_down`` does, for who holds the lab's lock."""
    found = leftovers(name)
    spaces = [names.NAMESPACES / space for space in list_namespaces() if names.belongs(space, name)]
    mine = identity(Path("/proc/self/ns/net"))
    if mine in [identity(space) for space in spaces]:
        raise BadRequestError(f"this process runs inside lab {name!r}: take it down from outside")
    for kind in KINDS:
        Helper(name, kind).end()
    for space in spaces:
        for _ in range(_ROUNDS):
            inside = [process for process in within(space) if process.pid != os.getpid()]
            for process in inside:
                process.end(0, identity(space))
            if not inside:
                break
        else:
            raise CommandError(
                f"processes keep appearing in {space.name}; stop what starts them, then try again"
            )
    for space in spaces:
        command(["ip", "netns", "del", space.name])
    names.state_file(name).unlink(missing_ok=True)
    return found

"""What a watcher leaves behind when its rank no longer gets on: one JSON file for each rank.

Files of one start of a job lie in one folder, ``RUN@INCARNATION``, below the folder for dumps, so
that ranks of different starts are never compared. Needs the standard library only, like its users.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gradpilot.worker_agent.flight_recorder import Note

SCHEMA = "gradpilot dump 1"

STALLED, ENDED = "stalled", "ended"
"""Reasons: no step for too long; or the process ended and had not closed its handle."""

FOLDERS_KEPT = 20
"""Starts whose dumps stay in the default folder."""


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of the rank when the dump was made.

    Attributes:
        id: System's thread id.
        name: What it is for: ``main``, ``hook``, or the name of a thread of ours.
        state: The kernel's letter: R, S, D, T (stopped) ...; "" if unknown.
        waits_in: Kernel function that it waits in, "" if unknown.
        stack: Python frames, innermost first, as text; "" if they could not be had.
    """

    id: int
    name: str
    state: str = ""
    waits_in: str = ""
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank was doing.

    Attributes:
        run: Run id.
        incarnation: Id of this start of the job; later ones sort after earlier ones.
        model: Name of the model within the run.
        rank: Rank in the group of the model.
        world_size: Ranks in that group.
        node: Host name.
        pid: Process id.
        reason: ``STALLED`` or ``ENDED``.
        at: Unix seconds when the dump was made.
        idle_seconds: How long before that the rank last got on.
        steps: Number of the step after the last one that ended; -1 if none has ended.
        notes: Buckets last handed over, oldest first.
        threads: The threads that matter, the main one first; empty if the process has ended.
    """

    run: str
    incarnation: str
    model: str
    rank: int
    world_size: int
    node: str
    pid: int
    reason: str
    at: float
    idle_seconds: float
    steps: int
    notes: tuple[Note, ...] = ()
    threads: tuple[Thread, ...] = ()


def default_folder() -> Path:
    """Return where dumps go unless a setting says otherwise: the user's own, on this machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"gradpilot-dumps-{quote(user, safe='')}"


def write(dump: Dump, folder: Path, *, prune: bool = False) -> Path:
    """Write a dump below ``folder``, instead of an earlier one of the same rank.

    Args:
        dump: What to write.
        folder: Folder for dumps; made if it is not there.
        prune: Remove the oldest starts if there are more than ``FOLDERS_KEPT``.

    Returns:
        The file.

    Raises:
        OSError: It cannot be written, or the folder is somebody else's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if prune and folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; set GRADPILOT_DUMPS")
    start = folder / quote(f"{dump.run}@{dump.incarnation}", safe="@")
    start.mkdir(mode=0o700, exist_ok=True)
    path = start / f"{quote(dump.model, safe='')}.rank{dump.rank:05d}.json"
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"schema": SCHEMA, **asdict(dump)}, indent=1) + "\n")
    partial.replace(path)
    if prune:
        _prune(folder)
    return path


def read(path: Path) -> Dump:
    """Return the dump in a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no dump; says why.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise ValueError(f"no {SCHEMA!r}")
    try:
        notes = tuple(Note(**_typed(Note, note)) for note in values.pop("notes"))
        threads = tuple(Thread(**_typed(Thread, thread)) for thread in values.pop("threads"))
        del values["schema"]
        # The empty ones are replaced: only fields of plain values are left to be checked.
        dump = Dump(**_typed(Dump, values), notes=notes, threads=threads)
    except (KeyError, TypeError) as error:
        raise ValueError(f"a field is missing, unknown or of another type: {error}") from None
    if not 0 <= dump.rank < dump.world_size:
        raise ValueError(f"rank {dump.rank} of {dump.world_size} cannot be")
    return dump


def _typed(kind: Any, values: Any) -> dict[str, Any]:
    """Return ``values`` if they have the types of the fields of ``kind``."""
    types: dict[str, Any] = {"str": str, "int": int, "float": (int, float)}
    if not isinstance(values, dict):
        raise TypeError(f"expected an object, got {values!r}")
    for name, value in values.items():
        field = kind.__dataclass_fields__[name]
        if not isinstance(value, types[field.type]) or isinstance(value, bool):
            raise TypeError(f"{name} must be {field.type}, got {value!r}")
    return values


def _prune(folder: Path) -> None:
    starts = sorted(
        (path for path in folder.iterdir() if path.is_dir() and "@" in path.name),
        key=lambda path: path.name.rpartition("@")[2],
    )
    for path in starts[:-FOLDERS_KEPT]:
        shutil.rmtree(path, ignore_errors=True)

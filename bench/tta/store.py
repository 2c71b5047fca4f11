"""Finished rows, a file each: what is there is kept, what was interrupted is not there."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.tta.matrix import Row

NEEDED = ("task", "network", "method", "seed", "ranks", "steps", "ends", "values", "in_sync",
          "others_cpu", "phases_met")  # fmt: skip


class BusyError(Exception):
    """Another process makes rows in the same folder."""


class Store:
    """A folder of rows.

    Args:
        folder: Made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, row: Row) -> dict[str, Any] | None:
        """Return a finished row; None if there is none, or none that can be read."""
        found = self.read(row.file)
        return found if found is not None and all(name in found for name in NEEDED) else None

    def save(self, row: Row, measured: dict[str, Any]) -> None:
        """Keep a row; a process that dies meanwhile leaves nothing."""
        self.write(row.file, measured)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return an object kept under a name; None if there is none."""
        try:
            found = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Keep an object under a name."""
        part = self.folder / f"{name}.part"
        part.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
        part.replace(self.folder / name)

    def finished(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return those rows that are finished, in order."""
        return [found for row in rows if (found := self.load(row)) is not None]

    def every(self) -> list[dict[str, Any]]:
        """Return all finished rows of the folder."""
        found = [self.read(path.name) for path in sorted(self.folder.glob("*.json"))]
        return [one for one in found if one is not None and all(name in one for name in NEEDED)]

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others from making rows here, whose labs would have the same name.

        Raises:
            BusyError: Somebody does.
        """
        with (self.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BusyError(f"another process makes rows in {self.folder}") from None
            yield

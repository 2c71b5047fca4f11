"""Result files, and the questions that a section asks them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import results_file

Row = Mapping[str, Any]


class ReportError(Exception):
    """A document cannot be made from the result files that there are."""


@dataclass(frozen=True, slots=True)
class Result:
    """A result file.

    Attributes:
        name: The file is ``NAME.json``.
        folder: Where it is; figures lie in ``figures`` beside it.
        document: What it holds, as described in ``results_file``.
    """

    name: str
    folder: Path
    document: Mapping[str, Any]

    def rows(self, **wanted: object) -> list[Row]:
        """Return the rows whose fields have these values."""
        return [
            row
            for row in self.document["rows"]
            if all(row.get(name) == value for name, value in wanted.items())
        ]

    def row(self, **wanted: object) -> Row:
        """Return the only row that fits.

        Raises:
            ReportError: None fits, or several do.
        """
        found = self.rows(**wanted)
        if len(found) != 1:
            raise ReportError(f"{self.name}.json has {len(found)} rows with {wanted}, wanted one")
        return found[0]

    @property
    def verdicts(self) -> list[Row]:
        """Return all verdicts."""
        return list(self.document["verdicts"])

    def matching(self, pattern: str) -> list[Row]:
        """Return the verdicts whose names a regular expression finds something in."""
        return [one for one in self.verdicts if re.search(pattern, one["name"])]

    def verdict(self, pattern: str) -> Row:
        """Return the only verdict whose name fits.

        Raises:
            ReportError: None fits, or several do.
        """
        found = self.matching(pattern)
        if len(found) != 1:
            raise ReportError(f"{self.name}.json has {len(found)} verdicts like {pattern!r}")
        return found[0]

    def provenance(self) -> str:
        """Return how, when, where and with what it was measured, as Markdown."""
        machine, versions = self.document["machine"], self.document["versions"]
        when = self.document["created"][:16].replace("T", " ")
        packages = ", ".join(f"{name} {version}" for name, version in versions.items())
        where = f"{machine['cpus']} x {machine['cpu']}, {machine['system']}"
        return (
            f"    {self.document['command']}\n\n"
            f"[{self.name}.json](../bench/results/{self.name}.json), {when} UTC; {where}, load"
            f" {machine['load_1min']:g} in the minute before it was written; {packages}."
        )


def load(name: str, folder: Path) -> Result | None:
    """Return a result file; None if there is none of that name.

    Raises:
        ReportError: It does not follow the format.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path.name}: {error}") from None
    problems = results_file.check(document)
    if problems:
        raise ReportError(f"{path.name}: {'; '.join(problems)}")
    return Result(name, folder, document)


def number(value: object) -> str:
    """Return what was measured in at most four significant digits; a text as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    every = [head, *rows]
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in every]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])

"""The README's table: of every benchmark the few figures that a user should know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.report.results import load, table
from bench.report.section import Section


def block(sections: Sequence[Section], folder: Path) -> str:
    """Return the table, in the order of the sections.

    Args:
        sections: All of them.
        folder: Of the result files.
    """
    rows = []
    for section in sections:
        result = load(section.result, folder)
        if result is None:
            continue
        file = f"[{section.result}](bench/results/{section.result}.json)"
        for what, wanted, measured, met in section.headlines(result):
            rows.append((what, wanted, measured if met else f"**{measured}**", file))
    return table(("what", "wanted", "measured", "file"), rows)

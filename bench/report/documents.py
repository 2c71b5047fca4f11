"""Which documents the report writes, and what belongs into them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.report import claims_table, headlines, netlab_table, sections
from bench.report.results import ReportError, Result, load
from bench.report.section import Section

ROOT = Path(__file__).parents[2]

TITLE = """\
# Benchmarks

This document is made by `make report` from the files of `bench/results/`; its words are in
`bench/report/sections/`. Every section begins with the command that makes its numbers again, and
with the machine, the versions and the date of those shown. What is compared was measured side by
side in one run; a target that was missed is listed with its cause as far as it is known. Rank
processes share the processors of one machine, so times spread widely: read ratios with their
deciles, which are in the files.
"""

MISSING = "## {}\n\nNot measured: there is no `bench/results/{}.json`.\n"
BLOCKS: Mapping[str, Callable[[Result], str]] = {
    "claims": claims_table.block,
    "netlab": netlab_table.block,
}
"""What is put into a document, ``docs/NAME.md``, from the result file of that name."""

BEGIN, END = "<!-- made by make report: {} -->", "<!-- end -->"


def all_sections() -> list[Section]:
    """Return the sections of every module of ``sections``, in their order."""
    names = [module.name for module in pkgutil.iter_modules(sections.__path__)]
    found = [importlib.import_module(f"{sections.__name__}.{name}").SECTION for name in names]
    return sorted(found, key=lambda section: section.position)


def benchmarks(folder: Path) -> str:
    """Return docs/benchmarks.md.

    Args:
        folder: Of the result files.

    Raises:
        ReportError: A file or a section is wrong.
    """
    parts = [TITLE]
    for section in all_sections():
        result = load(section.result, folder)
        missing = MISSING.format(section.title, section.result)
        parts.append(missing if result is None else section.render(result))
    return "\n".join(parts)


def put(text: str, name: str, block: str) -> str:
    """Return a document with a block between its marks.

    Raises:
        ReportError: The marks are not there.
    """
    begin = BEGIN.format(name)
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise ReportError(f"a document has lost its marks {begin} and {END}")
    return f"{before}{begin}\n\n{block}\n\n{END}{after}"


def build(folder: Path) -> dict[Path, str]:
    """Return every document and what it should hold.

    Args:
        folder: Of the result files.

    Raises:
        ReportError: A document cannot be made.
    """
    readme = ROOT / "README.md"
    built = {ROOT / "docs" / "benchmarks.md": benchmarks(folder)}
    block = headlines.block(all_sections(), folder)
    built[readme] = put(readme.read_text(encoding="utf-8"), "results", block)
    for name, made in BLOCKS.items():
        result = load(name, folder)
        if result is not None:
            path = ROOT / "docs" / f"{name}.md"
            built[path] = put(path.read_text(encoding="utf-8"), name, made(result))
    return built


def untrue(folder: Path) -> Iterator[str]:
    """Yield where words and figures of a section no longer fit."""
    for section in all_sections():
        result = load(section.result, folder)
        if result is not None:
            yield from section.untrue(result)

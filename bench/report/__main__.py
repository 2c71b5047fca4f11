"""The command: ``python -m bench.report``; see ``bench.report``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import results_file
from bench.report import documents
from bench.report.results import ReportError

SHOWN = 12
"""Lines of a difference that are printed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the documents, or compare them with what they should be.

    Returns:
        0 if they are, or have become, what the result files say; 1 if with ``--check`` one is not,
        or if words do not fit figures; 2 if a document cannot be made.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description="Make the documents' figures from result files."
    )
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    parser.add_argument(
        "--results", type=Path, default=results_file.RESULTS, help="folder of the result files"
    )
    arguments = parser.parse_args(argv)
    try:
        built = documents.build(arguments.results)
        wrong = list(documents.untrue(arguments.results))
    except ReportError as error:
        print(f"bench.report: {error}", file=sys.stderr)
        return 2
    for path, wanted in built.items():
        name = path.relative_to(documents.ROOT).as_posix()
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if there == wanted:
            continue
        if arguments.check:
            wrong.append(
                f"{name} is not what the result files say: make report\n{_differ(there, wanted)}"
            )
        else:
            path.write_text(wanted, encoding="utf-8")
            print(f"{name} written")
    for text in wrong:
        print(f"bench.report: {text}", file=sys.stderr)
    return 1 if wrong else 0


def _differ(there: str, wanted: str) -> str:
    lines = difflib.unified_diff(
        there.splitlines(), wanted.splitlines(), "there", "wanted", lineterm="", n=0
    )
    return "\n".join(list(lines)[:SHOWN])


if __name__ == "__main__":
    raise SystemExit(main())

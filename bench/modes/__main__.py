"""The command: ``python -m bench.modes``; see ``bench.modes``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import results_file
from bench.modes import analysis
from bench.modes.catalog import MODES
from bench.modes.copies import SEED
from bench.modes.measure import FULL, QUICK, measure
from bench.netlab import NetlabError, missing
from bench.tta.hosts import RowFailedError

QUICK_RESULT = Path("build") / "modes.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, judge, print, and write the result file.

    Returns:
        0 if everything was measured, whether or not each claim holds; 2 if not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.modes",
        description="What a managed dense plan costs a step in every mode of DDP.",
    )
    parser.add_argument("--quick", action="store_true", help="few blocks; the result is in build/")
    parser.add_argument("--modes", help="some of them only, with commas between; see bench.modes")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--result", type=Path, help="result file (bench/results/; --quick: build/)")
    arguments = parser.parse_args(argv)
    wanted = tuple(arguments.modes.split(",")) if arguments.modes else tuple(MODES)
    if unknown := set(wanted) - set(MODES):
        parser.error(f"no mode {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    if lacking := missing():
        return _refuse("needs emulated hosts, and " + "; ".join(lacking))
    rows: list[dict[str, Any]] = []
    try:
        for setup in QUICK if arguments.quick else FULL:
            ours = dataclasses.replace(setup, modes=wanted)
            rows += analysis.rows(ours, measure(ours, _say))
    except (NetlabError, RowFailedError) as error:
        return _refuse(str(error))
    verdicts = analysis.verdicts(rows)
    # Some modes alone are no whole result.
    path = arguments.result or (QUICK_RESULT if arguments.quick or arguments.modes else None)
    written = results_file.write("modes", _command(arguments), [SEED], rows, verdicts, path)
    if arguments.output == "json":
        print(written.read_text(encoding="utf-8"), end="")
    else:
        print(text(rows, verdicts))
        print(written)
    return 0


def text(rows: Sequence[dict[str, Any]], verdicts: Sequence[dict[str, Any]]) -> str:
    """Return rows and verdicts for people."""
    lines = [
        f"{row['environment']:18s} {row['mode']:24s} plain {row['plain_step_ms']:7.1f} ms, managed"
        f" / plain {row['ratio_median']:.3f} ({row['ratio_p10']:.3f} to {row['ratio_p90']:.3f}),"
        f" all {row['ratio_all']:.3f}, {row['blocks']} blocks, {row['buckets']} buckets"
        for row in rows
    ]
    return "\n".join([*lines, *results_file.judged(verdicts)])


def _command(arguments: argparse.Namespace) -> str:
    modes = f" --modes {arguments.modes}" if arguments.modes else ""
    return f"python -m bench.modes{' --quick' if arguments.quick else ''}{modes}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _refuse(words: str) -> int:
    print(f"bench.modes: {words}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())

"""The command: ``python -m bench.network_model``; see ``bench.network_model``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import results_file
from bench.netlab import NetlabError, missing
from bench.network_model import analysis
from bench.network_model.grid import QUICK, Grid, measure
from bench.network_model.ranks import RanksFailedError

QUICK_RESULT = Path("build") / "network_model.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, judge, print, and write the result file.

    Returns:
        0 if everything was measured, whether or not each claim holds; 2 if not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.network_model",
        description="Predicted against measured times of collectives, on emulated hosts.",
    )
    parser.add_argument("--quick", action="store_true", help="one network, one number of ranks")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--result", type=Path, help="result file (bench/results/; --quick: build/)")
    arguments = parser.parse_args(argv)
    if lacking := missing():
        return _refuse("needs emulated hosts, and " + "; ".join(lacking))
    grid = QUICK if arguments.quick else Grid()
    try:
        cells = measure(grid, lambda text: print(text, file=sys.stderr, flush=True))
    except (NetlabError, RanksFailedError) as error:
        return _refuse(str(error))
    rows = analysis.rows(cells)
    verdicts = analysis.verdicts(rows)
    command = "python -m bench.network_model" + (" --quick" if arguments.quick else "")
    path = arguments.result or (QUICK_RESULT if arguments.quick else None)
    written = results_file.write("network_model", command, [grid.seed], rows, verdicts, path)
    if arguments.output == "json":
        print(written.read_text(encoding="utf-8"), end="")
    else:
        print(text(rows, verdicts))
        print(written)
    return 0


def text(rows: Sequence[dict[str, Any]], verdicts: Sequence[dict[str, Any]]) -> str:
    """Return errors, coefficients and verdicts for people; cells are in the file only."""
    lines = []
    for row in rows:
        if row["case"] == "errors":
            lines.append(
                f"{row['prediction']:7s} {row['collective']:16s} median"
                f" {row['median_error_percent']:6.2f} %  p90 {row['p90_error_percent']:6.2f} %"
                f"  bias {row['bias_percent']:+7.2f} %  ({row['cells']} cells)"
            )
        elif row["case"] == "coefficients":
            lines.append(
                f"{row['collective']:16s} N = {row['ranks']}: {row['cost_alphas']:5.2f} alpha +"
                f" {row['cost_payloads']:.3f} M beta; measured {row['affine_alphas']:5.2f} alpha +"
                f" {row['affine_payloads']:.3f} M beta; busiest rank sends"
                f" {row['sent_most_payloads']:.3f} M"
            )
    return "\n".join([*lines, *results_file.judged(verdicts)])


def _refuse(words: str) -> int:
    print(f"bench.network_model: {words}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())

"""The command: ``python -m bench.skip``; see ``bench.skip``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from bench import results_file
from bench.netlab import NetlabError, missing
from bench.network_model.ranks import RanksFailedError
from bench.skip import accuracy, timing

QUICK_RESULT = Path("build") / "skip.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, judge, print, and write the result file.

    Returns:
        0 if everything was measured, whether or not each claim holds; 2 if not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.skip",
        description="What skipping reduce steps saves in time and costs in accuracy.",
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, short trainings")
    parser.add_argument("--part", choices=("time", "accuracy"), help="one of the two (both)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--result", type=Path, help="result file (bench/results/; --quick: build/)")
    arguments = parser.parse_args(argv)
    times, trainings = (arguments.part in (None, part) for part in ("time", "accuracy"))
    if times and (lacking := missing()):
        return _refuse("times need emulated hosts, and " + "; ".join(lacking))
    torch.set_num_threads(1)
    setup = timing.QUICK if arguments.quick else timing.Setup()
    training = accuracy.QUICK if arguments.quick else accuracy.FULL

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    rows: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    seeds: list[int] = []
    try:
        if times:
            timed = timing.measure(setup, say)
            rows, verdicts, seeds = [*timed], timing.verdicts(timed), [setup.seed]
    except (NetlabError, RanksFailedError) as error:
        return _refuse(str(error))
    if trainings:
        trained = accuracy.measure(training, say)
        rows, verdicts = [*rows, *trained], [*verdicts, *accuracy.verdicts(trained)]
        seeds = sorted({*seeds, *training.seeds})
    # A part alone is no whole result.
    aside = arguments.quick or arguments.part
    path = arguments.result or (QUICK_RESULT if aside else None)
    written = results_file.write("skip", _command(arguments), seeds, rows, verdicts, path)
    if arguments.output == "json":
        print(written.read_text(encoding="utf-8"), end="")
    else:
        print(text(rows, verdicts))
        print(written)
    return 0


def text(rows: Sequence[dict[str, Any]], verdicts: Sequence[dict[str, Any]]) -> str:
    """Return rows and verdicts for people."""
    lines = []
    for row in rows:
        if row["case"] == "time":
            ratio = f"{row['over_steps']:.3f} of its steps'" if row["skip"] else "(foretells)"
            lines.append(
                f"N = {row['ranks']}, {row['megabytes']:2d} MB, S = {row['skip']}:"
                f" {row['measured_ms']:8.1f} ms, {ratio}, {row['over_link']:.3f} of the link's,"
                f" speed-up {row['speedup']:.3f} of at most {row['most_speedup']:.3f}"
            )
        else:
            kept = ", feedback" if row["feedback"] else ""
            what = (
                f"S = {row['skip']}, {row['choice']}, divisor {row['divisor']}{kept}"
                if row["skip"]
                else "all-reduce"
            )
            lines.append(
                f"{row['data']}: {what}: {row['accuracy_percent']:.2f} % at rate"
                f" {row['rate']:g}, {row['less_than_dense_points']:+.2f} points less than"
                f" all-reduce ({row['less_at_dense_rate_points']:+.2f} at its rate)"
            )
    return "\n".join([*lines, *results_file.judged(verdicts)])


def _command(arguments: argparse.Namespace) -> str:
    words = ["python -m bench.skip"]
    words += ["--quick"] if arguments.quick else []
    words += [f"--part {arguments.part}"] if arguments.part else []
    return " ".join(words)


def _refuse(words: str) -> int:
    print(f"bench.skip: {words}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())

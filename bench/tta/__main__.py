"""The command: ``python -m bench.tta``; see ``bench.tta``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench import results_file
from bench.netlab import NetlabError, missing
from bench.tta import estimate, figures, matrix, oracle, report, rows
from bench.tta.hosts import RowFailedError
from bench.tta.methods import METHODS, Method
from bench.tta.networks import NETWORKS, Network
from bench.tta.store import BusyError, Store
from bench.tta.tasks import TASKS, Task
from gradpilot.errors import GradpilotError

FOLDER = Path("build") / "tta"


def main(argv: Sequence[str] | None = None) -> int:
    """Make rows and report.

    Returns:
        0 if every row ended well and passed its checks, whether or not each claim holds; 1 if not;
        2 if nothing could be done.
    """
    arguments = _parser().parse_args(argv)
    try:
        wanted = matrix.rows(_matrix(arguments), arguments.rows, arguments.ranks, arguments.steps)
    except ValueError as error:
        return _refuse(str(error))
    store = Store(arguments.folder)
    if arguments.list:
        _list(wanted, store, arguments.output)
        return 0
    if not arguments.report and (lacking := missing()):
        return _refuse("a row needs emulated hosts, and " + "; ".join(lacking))
    failed: list[str] = []
    if not arguments.report:
        try:
            with store.alone():
                failed = _make(wanted, store, arguments.again)
        except BusyError as error:
            return _refuse(str(error))
    finished = store.finished(wanted)
    if not finished:
        return _refuse("no row is finished" + "".join(f"; {text}" for text in failed))
    return _conclude(finished, failed, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tta",
        description="Time to accuracy of one training under several methods, on emulated hosts.",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="list the rows, whether they are finished, and how long they will take",
    )
    parser.add_argument(
        "--rows",
        default="*",
        metavar="PATTERN",
        help="task/network/method/seed, each a comma list of patterns: cnn/c1,fast/*/0",
    )
    parser.add_argument("--quick", action="store_true", help="a few short rows (matrix quick)")
    parser.add_argument(
        "--matrix",
        choices=tuple(matrix.MATRICES),
        help="what --rows chooses from: all, or without --rows what is required",
    )
    parser.add_argument("--steps", type=int, default=0, help="steps of a training (the task's own)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks, a host each (%(default)s)")
    parser.add_argument("--again", action="store_true", help="make finished rows again")
    parser.add_argument("--report", action="store_true", help="make no row, report what is there")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="finished rows (%(default)s)")
    parser.add_argument("--result", type=Path, help="result file (result.json beside the rows)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    return parser


def _matrix(arguments: argparse.Namespace) -> str:
    if arguments.quick:
        return "quick"
    return str(arguments.matrix or ("required" if arguments.rows == "*" else "all"))


def _refuse(text: str) -> int:
    print(f"bench.tta: {text}", file=sys.stderr)
    return 2


def _list(wanted: Sequence[matrix.Row], store: Store, output: str) -> None:
    options = len(oracle.candidates(wanted[0].ranks))
    estimated = estimate.total(wanted, estimate.known(store), options)
    listed: list[dict[str, Any]] = [
        {"row": row.id, "ranks": row.ranks, "steps": row.steps,
         "finished": store.load(row) is not None, "estimated_seconds": round(seconds)}
        for row, seconds in zip(wanted, estimated, strict=True)
    ]  # fmt: skip
    if output == "json":
        print(json.dumps(listed, indent=1))
        return
    every: tuple[Mapping[str, Task | Network | Method], ...] = (TASKS, NETWORKS, METHODS)
    for kind in every:
        for name, described in kind.items():
            if any(name in row.id.split("/") for row in wanted):
                print(f"{name:15s} {described.what}")
        print()
    hours = 0.0
    for one in listed:
        state = "finished" if one["finished"] else "to do"
        hours += 0.0 if one["finished"] else one["estimated_seconds"] / 3600
        shown = f"{one['estimated_seconds']:5d} s  in all {hours:5.2f} h"
        print(f"{state:9s} {shown}  {one['row']}, {one['steps']} steps")
    left = sum(not one["finished"] for one in listed)
    print(
        f"\n{len(listed)} rows, {left} to do, about {hours:.1f} hours (estimated, see estimate.py)"
    )


def _make(wanted: Sequence[matrix.Row], store: Store, again: bool) -> list[str]:
    """Make what is not there; return what failed."""
    failed = []
    for number, row in enumerate(wanted, 1):
        place = f"[{number}/{len(wanted)}] {row.id}"
        if not again and store.load(row) is not None:
            _say(f"{place}: finished before")
            continue
        begun = time.monotonic()
        try:
            pins = oracle.pins(row, store, store.every()) if row.method == "oracle" else ()
            measured = rows.run(row, store.folder, pins)
        except (RowFailedError, NetlabError, GradpilotError, oracle.NothingKnownError) as error:
            failed.append(f"{row.id}: {error}")
            _say(f"{place}: FAILED after {time.monotonic() - begun:.0f} s: {error}")
            continue
        store.save(row, measured)
        _say(f"{place}: {_told(measured)}")
    return failed


def _told(measured: dict[str, Any]) -> str:
    ends = measured["ends"]
    steps = [b - a for a, b in zip([0.0, *ends], ends, strict=False)]
    values = measured["values"]
    words = "" if measured["in_sync"] else ", OUT OF SYNC"
    words += "" if measured["conserved"] else ", SUMS DO NOT ADD UP"
    last = "not finite" if values[-1] is None else f"{values[-1]:.4f}"
    return (
        f"{measured['seconds']:.1f} s of training ({1e3 * statistics.median(steps):.0f} ms a step),"
        f" ends at {last}, {measured['switches']} switches, row {measured['wall_seconds']:.0f} s"
        f"{words}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _conclude(
    finished: Sequence[dict[str, Any]], failed: Sequence[str], arguments: argparse.Namespace
) -> int:
    path = arguments.result or arguments.folder / "result.json"
    flat, verdicts = report.rows(finished), report.verdicts(finished)
    seeds = sorted({row["seed"] for row in finished})
    written = results_file.write("tta", _command(arguments), seeds, flat, verdicts, path)
    drawn = figures.write(finished, path.parent / "figures")
    if arguments.output == "json":
        print(written.read_text(encoding="utf-8"), end="")
    else:
        print(report.text(finished, verdicts))
        print(f"{written}; figures: {', '.join(str(one) for one in drawn)}")
    for text in failed:
        print(f"bench.tta: {text}", file=sys.stderr)
    sound = all(row["in_sync"] and row["conserved"] for row in finished)
    return 0 if sound and not failed else 1


def _command(arguments: argparse.Namespace) -> str:
    words = ["python -m bench.tta"]
    words += ["--quick"] if arguments.quick else [f"--matrix {_matrix(arguments)}"]
    words += [f"--rows '{arguments.rows}'"] if arguments.rows != "*" else []
    words += [f"--steps {arguments.steps}"] if arguments.steps else []
    words += [f"--ranks {arguments.ranks}"] if arguments.ranks != 4 else []
    return " ".join(words)


if __name__ == "__main__":
    raise SystemExit(main())

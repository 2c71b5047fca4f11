"""``gradpilot demo``: start the ranks, show what happens, judge it, write the report."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from gradpilot.demo.records import KINDS, Settings, read_records, write_settings
from gradpilot.demo.report import BANNER, write_report
from gradpilot.demo.result import Runs, build
from gradpilot.demo.schedule import Schedule, make_schedule
from gradpilot.demo.table import Table, link_text
from gradpilot.errors import GradpilotError

DEFAULT_REPORT = Path("demo-report") / "index.html"

SECONDS_PER_STEP = 1.5
START_SECONDS = 90.0
"""A step of the slowest phase under bf16, and starting, on a machine that is busy: the deadline."""

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: list[str]) -> int:
    """Run the demo.

    Args:
        argv: Arguments after the command's name.

    Returns:
        0 if both runs ended well with all ranks in sync, whether or not every claim holds; 1 if
        they did not; 2 for wrong arguments; 130 if interrupted.
    """
    arguments = _parser().parse_args(argv)
    # With JSON the result alone goes to stdout.
    out = sys.stderr if arguments.output == "json" else sys.stdout
    try:
        with _terminable():
            return _run(arguments, out)
    except KeyboardInterrupt:
        out.write("\ninterrupted; the ranks have been ended\n")
        return EXIT_INTERRUPTED
    except (GradpilotError, OSError) as error:
        sys.stderr.write(f"gradpilot demo: {error}\n")
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradpilot demo",
        description="Trains on four ranks over an emulated link that goes from fast to slow to high"
        " latency and back, once under gradpilot and once with static bf16, and compares.",
        epilog="Nothing needs root; nothing but loopback is used.",
    )
    parser.add_argument(
        "--dataset",
        default="auto",
        choices=("auto", "digits", "fashion-mnist"),
        help="auto: Fashion-MNIST where it is installed, else handwritten digits",
    )
    parser.add_argument(
        "--quick", action="store_true", help="short phases and no warm-up, for a first look"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="total number of steps, shared out over the phases"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    parser.add_argument(
        "--output", default="text", choices=("text", "json"), help="json: one object on stdout"
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=DEFAULT_REPORT,
        help="where to write the HTML report (default: %(default)s)",
    )
    return parser


def _run(arguments: argparse.Namespace, out: TextIO) -> int:
    # Here, so that --help does not wait for torch.
    from gradpilot.demo import data

    begun = time.monotonic()
    schedule = make_schedule(arguments.quick, arguments.steps)
    settings = Settings(data.choose(arguments.dataset), arguments.seed, schedule)
    table = Table(out, schedule.steps)
    _introduce(table, settings)
    with tempfile.TemporaryDirectory(prefix="gradpilot-demo-") as name:
        folder = Path(name)
        write_settings(folder, settings)
        runs = _train(folder, settings, table, warm_up=not arguments.quick)
    result = build(runs, time.monotonic() - begun)
    write_report(arguments.report, runs, result)
    _conclude(table, result, arguments.report)
    if arguments.output == "json":
        sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
    if not result["in_sync"]:
        equal, total = runs.compared
        sys.stderr.write(
            f"gradpilot demo: ranks out of sync: parameters were equal at {equal} of {total}"
            " sampled steps; this must never happen, please report it\n"
        )
        return EXIT_FAILED
    return 0


def _train(folder: Path, settings: Settings, table: Table, warm_up: bool) -> Runs:
    from gradpilot.demo.launch import WORLD_SIZE, Ranks
    from gradpilot.demo.operator import Watcher

    deadline = START_SECONDS + len(KINDS) * SECONDS_PER_STEP * settings.schedule.steps
    watcher: Watcher | None = None
    try:
        with Ranks(folder, deadline, warm_up) as ranks:
            for event in ranks.events():
                if event is None:
                    continue
                if event["event"] == "attached":
                    if watcher is not None:
                        watcher.close()
                        watcher = None
                    if event["controller"]:
                        watcher = Watcher(event["controller"], event["run"], event["model"])
                    _announce(table, event)
                else:
                    table.row(event, watcher.newest if watcher is not None else None)
    finally:
        if watcher is not None:
            watcher.close()
    adaptive, baseline = (read_records(folder, kind, WORLD_SIZE) for kind in KINDS)
    return Runs.of(settings, adaptive, baseline)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that the ranks are ended, too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- words -------------------------------------------------------------------------------------


def _introduce(table: Table, settings: Settings) -> None:
    table.line(f"gradpilot demo: {settings.dataset}, {settings.schedule.steps} steps, 4 ranks")
    for line in textwrap.wrap(BANNER, 96):
        table.line(line)
    for line in _schedule_lines(settings.schedule):
        table.line(line)
    table.line()
    table.line("starting the ranks ...")


def _schedule_lines(schedule: Schedule) -> Iterator[str]:
    for phase, end in schedule.spans():
        link = link_text(phase.latency_seconds, phase.beta)
        yield f"  steps {phase.first_step:4d} to {end - 1:4d}  {phase.name:12s}  {link}"


def _announce(table: Table, event: dict[str, Any]) -> None:
    table.line()
    if event["kind"] == "adaptive":
        where = event["controller"] or "none: it could not start"
        table.line(f"1. with gradpilot (controller {where}; the link is emulated)")
    else:
        table.line("2. the same steps and phases with static bf16 (the link is emulated)")
    table.header()


def _conclude(table: Table, result: dict[str, Any], report: Path) -> None:
    table.line()
    table.line("why each switch happened")
    for decision in result["decisions"]:
        start = decision["in_force_from"]
        when = f"in force from step {start}" if start is not None else "never in force"
        options = " + ".join(decision["options"])
        table.line(f"  step {decision['step']}, phase {decision['phase']}: {options}; {when}")
        for line in textwrap.wrap(decision["reason"], 92):
            table.line(f"      {line}")
    table.line()
    table.line("phases (settled step time; the link is emulated)")
    for phase in result["phases"]:
        own, other = (1e3 * phase[k] for k in ("step_seconds", "baseline_step_seconds"))
        options = " + ".join(phase["options"])
        table.line(f"  {phase['name']:12s}  {own:5.0f} ms  bf16 {other:5.0f} ms  {options}")
    table.line()
    table.line("claims")
    for claim in result["claims"]:
        word = "holds" if claim["holds"] else "FAILS"
        table.line(f"  {word}  {claim['name']}: {claim['measured']} (target {claim['target']})")
    table.line()
    table.line(
        f"gradpilot {result['seconds']:.1f} s, {100 * result['final_accuracy']:.2f} %;"
        f" static bf16 {result['baseline_seconds']:.1f} s,"
        f" {100 * result['baseline_accuracy']:.2f} %;"
        f" all in {result['elapsed_seconds']:.0f} s; report: {report}"
    )

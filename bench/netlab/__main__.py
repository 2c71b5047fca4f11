"""The commands ``up set trace exec status check down``; see docs/netlab.md.

A command ends with 0 if all is well, with 1 if ``check`` or ``status`` found that something is not
as asked for, and with 2 if it could not do what it should.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from bench.netlab import names
from bench.netlab.checks import check, verdict
from bench.netlab.errors import BadRequestError, NetlabError
from bench.netlab.lab import DEFAULT_LINK, Lab
from bench.netlab.link import parse_flow, parse_number
from bench.netlab.teardown import take_down
from bench.netlab.trace import Applied, Change, Trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    options = _parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return int(options.run(options))
    except NetlabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.netlab",
        description="Emulated hosts on one Linux machine, with rates and latency as asked for.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run: Any, text: str, output: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--name", default="lab", help="which lab (%(default)s)")
        if output:
            sub.add_argument("--output", choices=("text", "json"), default="text")
        sub.set_defaults(run=run)
        return sub

    up = command("up", _up, "make a lab")
    up.add_argument("--hosts", type=int, default=4, help="how many (%(default)s)")
    up.add_argument("--mtu", type=int, default=1500, help="largest packet, bytes (%(default)s)")
    up.add_argument("--congestion", default="cubic", help="TCP's congestion control (%(default)s)")
    up.add_argument("--replace", action="store_true", help="take a lab of that name down first")
    up.add_argument("--check", action="store_true", help="measure it; if it is not as asked, end")
    change = command("set", _set, "change links or background traffic, live")
    change.add_argument(
        "--host", type=int, action="append", help="whose link (all); may be repeated"
    )
    change.add_argument(
        "--background",
        action="append",
        default=[],
        metavar="FROM-TO=MBIT",
        help="datagrams from host to host at that rate, 0 ends them; may be repeated",
    )
    for sub, link in ((up, DEFAULT_LINK), (change, None)):
        default = "(%(default)s)" if link else "(as it is)"
        sub.add_argument(
            "--rate-mbit",
            type=float,
            default=link and link.rate_mbit,
            help=f"Mbit/s in each direction {default}",
        )
        sub.add_argument(
            "--rtt-ms",
            type=float,
            default=link and link.rtt_ms,
            help=f"round trip between two hosts, ms {default}",
        )
    trace = command("trace", _trace, "replay changes from a CSV file until the last, or SIGINT")
    trace.add_argument("file", type=Path)
    trace.add_argument("--loop", type=float, metavar="SECONDS", help="start over after so long")
    run = command("exec", _exec, "run a program on a host", output=False)
    run.add_argument("host", type=int)
    run.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...")
    command("status", _status, "show settings, counters and problems")
    measure = command("check", _check, "measure an idle lab and say what is not as asked for")
    measure.add_argument("--seconds", type=float, default=1.0, help="for each pair (%(default)s)")
    command("down", _down, "remove a lab, or what is left of it")
    return parser


def _show(options: argparse.Namespace, fields: Any, text: str) -> None:
    print(json.dumps(fields) if options.output == "json" else text, flush=True)


def _up(options: argparse.Namespace) -> int:
    lab = Lab(
        options.name,
        hosts=options.hosts,
        link=DEFAULT_LINK.changed(options.rate_mbit, options.rtt_ms),
        mtu=options.mtu,
        congestion=options.congestion,
        replace=options.replace,
    )
    lab.up()
    if options.check:
        return _check(options)
    addresses = [names.address(i) for i in range(options.hosts)]
    _show(
        options,
        {"name": options.name, "addresses": addresses},
        f"lab {options.name} is up: hosts 0 to {options.hosts - 1} have "
        f"{addresses[0]} to {addresses[-1]}",
    )
    return 0


def _set(options: argparse.Namespace) -> int:
    lab = Lab.open(options.name)
    changes = [Change(0.0, None, *_flow(text), None) for text in options.background]
    if options.rate_mbit is not None or options.rtt_ms is not None:
        for host in options.host or [None]:
            changes.append(Change(0.0, host, None, options.rate_mbit, options.rtt_ms))
    if not changes:
        raise BadRequestError("nothing to set: give --rate-mbit, --rtt-ms or --background")
    lab.apply(changes)
    return 0


def _flow(text: str) -> tuple[tuple[int, int], float]:
    flow, equals, rate = text.partition("=")
    if not equals:
        raise BadRequestError(f"background traffic is FROM-TO=MBIT such as 0-1=30, got {text!r}")
    return parse_flow(flow), parse_number(rate, "its rate")


def _trace(options: argparse.Namespace) -> int:
    def tell(one: Applied) -> None:
        words = ", ".join(_words(change) for change in one.changes)
        _show(options, asdict(one), f"{one.done_seconds:9.3f} s: {words}")

    lab = Lab.open(options.name)
    replay = lab.play(Trace.read(options.file), loop_seconds=options.loop, tell=tell)
    try:
        while not replay.wait(1.0):
            pass
    finally:
        replay.stop()
    return 0


def _words(change: Change) -> str:
    if change.flow is not None:
        return f"background {change.flow[0]}-{change.flow[1]} {change.rate_mbit:g} Mbit/s"
    what = [f"{change.rate_mbit:g} Mbit/s"] if change.rate_mbit is not None else []
    what += [f"{change.rtt_ms:g} ms"] if change.rtt_ms is not None else []
    return f"host {'*' if change.host is None else change.host} {' '.join(what)}"


def _exec(options: argparse.Namespace) -> int:
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    if not argv:
        raise BadRequestError(
            "expected a program after --, such as: exec 0 -- ping -U -c3 10.77.0.2"
        )
    command = Lab.open(options.name).command(options.host, argv)
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execv(command[0], command)


def _status(options: argparse.Namespace) -> int:
    status = Lab.open(options.name).status()
    lines = [f"lab {status['name']}: MTU {status['mtu']}, {status['congestion']}"]
    for row in status["hosts"]:
        link = f"{row['rate_mbit']:g} Mbit/s {row['rtt_ms']:g} ms"
        line = f"  {row['host']:3}  {row['address']:12} {link}"
        if "sent_bytes" in row:
            line += f", sent {row['sent_bytes']} B, received {row['received_bytes']} B"
            line += f", dropped {row['dropped_packets']} packets"
        lines.append(line)
    lines += [f"  background {flow}: {rate:g} Mbit/s" for flow, rate in status["flows"].items()]
    if status["delay"]:
        delay = status["delay"]
        lines.append(
            f"  delay process {delay['pid']}: {sum(delay['packets'])} packets, "
            f"{delay['cpu_seconds']:g} s of processor, latest {max(delay['late_most_us'])} us late"
        )
    lines += [f"  PROBLEM: {problem}" for problem in status["problems"]]
    _show(options, status, "\n".join(lines))
    return int(bool(status["problems"]))


def _check(options: argparse.Namespace) -> int:
    seconds = getattr(options, "seconds", 1.0)
    measured = check(Lab.open(options.name), seconds=seconds)
    problems = verdict(measured)
    lines = [
        f"{one.source} -> {one.target}: {one.measured_mbit:.1f} of {one.asked_mbit:g} Mbit/s, "
        f"round trip {one.measured_rtt_ms:.3f} of {one.asked_rtt_ms:g} ms, "
        f"delay process {one.delay_cpu:.0%} of a core"
        for one in measured
    ]
    lines += [f"NOT AS ASKED: {problem}" for problem in problems] or ["all as asked for"]
    fields = {"pairs": [asdict(one) for one in measured], "problems": problems}
    _show(options, fields, "\n".join(lines))
    return int(bool(problems))


def _down(options: argparse.Namespace) -> int:
    removed = take_down(options.name)
    text = f"removed {', '.join(removed)}" if removed else f"nothing was left of {options.name}"
    _show(options, {"name": options.name, "removed": removed}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

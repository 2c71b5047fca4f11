"""``gradpilot simulate``: policies on a made-up or recorded network, without any training."""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from gradpilot.errors import ConfigError
from gradpilot.policies.base import POLICIES, PolicySettings
from gradpilot.program import exit_code
from gradpilot.protos.option_text import parse_option
from gradpilot.simulate.compare import Comparison, Contender, compare
from gradpilot.simulate.driver import Case
from gradpilot.simulate.engine import QUIET, Noise
from gradpilot.simulate.jobs import JOBS, make_job
from gradpilot.simulate.traces import MAKERS, Trace, constant, format_trace, make_trace
from gradpilot.simulate.world import World

ROUND_SECONDS = 1200.0
"""Length of one round of a made-up trace if nobody says otherwise."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    arguments = _parser().parse_args(argv)
    return exit_code("gradpilot simulate", lambda: _run(arguments, sys.stdout))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradpilot simulate", description=(__doc__ or "").split(": ", 1)[1]
    )
    parser.add_argument(
        "--trace", default="steps", metavar="NAME",
        help=f"constant, {', '.join(MAKERS)}, or a file NAME.csv (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--link", metavar="MS,GBPS", help="a constant link instead of --trace")
    parser.add_argument("--model", default="resnet50", choices=JOBS)
    parser.add_argument("--ranks", type=int, default=8, help="2 to 4096 (default: %(default)s)")
    parser.add_argument(
        "--policy", default="adaptive,fixed", metavar="NAME,...",
        help="names of gradpilot policies, or fixed:OPTION (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of trace and noise")
    parser.add_argument(
        "--steps", type=int, default=2000, help="dense steps' worth of progress to reach"
    )
    parser.add_argument(
        "--seconds", type=float, default=ROUND_SECONDS,
        help="length of one round of the trace (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl", "model"))
    parser.add_argument("--interval", type=int, default=50, help="steps between decision steps")
    parser.add_argument("--quiet", action="store_true", help="no noise at all")
    parser.add_argument("--explain", action="store_true", help="list switches with their reasons")
    parser.add_argument(
        "--print-trace", action="store_true", help="print the trace as CSV and do nothing else"
    )
    parser.add_argument("--output", default="text", choices=("text", "json"))
    return parser


def _run(arguments: argparse.Namespace, out: TextIO) -> int:
    for name in ("steps", "interval"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if arguments.seed < 0:
        raise ConfigError(f"--seed must not be negative, got {arguments.seed}")
    trace = _trace(arguments)
    if arguments.print_trace:
        out.write(format_trace(trace))
        return 0
    contenders = tuple(_contender(text) for text in _split(arguments.policy))
    case = Case(
        World(make_job(arguments.model), arguments.ranks, arguments.backend),
        trace,
        arguments.steps,
        arguments.seed,
        QUIET if arguments.quiet else Noise(),
        PolicySettings(interval=arguments.interval),
    )
    comparison = compare(case, contenders)
    if arguments.output == "json":
        out.write(json.dumps(as_json(comparison), allow_nan=False) + "\n")
    else:
        _table(comparison, out, explain=arguments.explain)
    return 0


def _trace(arguments: argparse.Namespace) -> Trace:
    if not arguments.link:
        return make_trace(arguments.trace, arguments.seed, arguments.seconds)
    try:
        ms, gbps = (float(text) for text in arguments.link.split(","))
    except ValueError:
        ms, gbps = math.nan, math.nan
    if not (0 <= ms < math.inf and 0 < gbps < math.inf):
        raise ConfigError(f"--link needs a latency in ms and Gbit/s, got {arguments.link!r}")
    return constant(ms, gbps)


def _split(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--policy needs at least one name")
    return list(dict.fromkeys(names))


def _contender(text: str) -> Contender:
    name, colon, option = text.partition(":")
    if name not in POLICIES.names():
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES.names())}")
    if not colon:
        return Contender(name)
    if name != "fixed":
        raise ConfigError(f"only fixed takes an option, got {text!r}")
    return Contender(name, parse_option(option))


# --- output ------------------------------------------------------------------------------------


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as it is printed."""
    case = comparison.case
    return {
        "trace": case.trace.name,
        "model": case.world.job.name,
        "ranks": case.world.ranks,
        "backend": case.world.backend,
        "seed": case.seed,
        "steps": case.steps,
        "oracle_seconds": comparison.oracle_seconds,
        "best_fixed": {
            "option": comparison.best_fixed.label,
            "seconds": comparison.best_fixed_seconds,
        },
        "policies": [
            {
                "policy": name,
                "seconds": result.seconds,
                "steps": result.steps,
                "mean_step_seconds": result.seconds / result.steps,
                "regret": comparison.regret(name),
                "versus_best_fixed": comparison.versus_fixed(name),
                "decisions": result.decisions,
                "probe_seconds": result.probe_seconds,
                "below_floor": result.below_floor,
                "switches": [
                    {
                        "step": switch.step,
                        "seconds": switch.seconds,
                        "decided": switch.decided,
                        "options": [option.label for option in switch.options],
                        "reason": switch.reason,
                    }
                    for switch in result.switches
                ],
            }
            for name, result in comparison.results.items()
        ],
    }


def _table(comparison: Comparison, out: TextIO, *, explain: bool) -> None:
    case = comparison.case
    out.write(
        f"{case.world.job.what}; {case.world.ranks} ranks, {case.world.backend}\n"
        f"trace {case.trace.name}, {len(case.trace.starts)} pieces; seed {case.seed}\n\n"
    )
    row = "{:34} {:>10} {:>8} {:>10} {:>8} {:>7} {:>8} {:>8} {:>7}\n"
    out.write(
        row.format(
            "POLICY", "TOTAL", "STEPS", "MEAN STEP", "SWITCHES", "PROBES", "REGRET", "VS FIXED",
            "RISKY",
        )
    )  # fmt: skip
    for name, result in comparison.results.items():
        out.write(
            row.format(
                name,
                f"{result.seconds:.1f} s",
                result.steps,
                f"{1e3 * result.seconds / result.steps:.1f} ms",
                len(result.switches),
                result.decisions.get("probe", 0),
                f"{100 * comparison.regret(name):.1f} %",
                f"{comparison.versus_fixed(name):.3f}",
                f"{100 * result.below_floor:.0f} %",
            )
        )
    fixed = f"best fixed: {comparison.best_fixed.label}"
    out.write(row.format(fixed, f"{comparison.best_fixed_seconds:.1f} s", *[""] * 7).rstrip())
    out.write("\n")
    out.write(row.format("oracle", f"{comparison.oracle_seconds:.1f} s", *[""] * 7).rstrip())
    out.write(
        f"\n\nTOTAL is the time to the progress of {case.steps} dense steps; RISKY the share of"
        " steps below the gain floor.\n"
    )
    if explain:
        for name, result in comparison.results.items():
            out.write(f"\n{name}: {len(result.switches)} switches\n")
            for switch in result.switches:
                labels = " + ".join(option.label for option in switch.options)
                out.write(f"  {switch.seconds:9.1f} s, step {switch.step}: {labels}\n")
                for line in textwrap.wrap(switch.reason, 90):
                    out.write(f"      {line}\n")

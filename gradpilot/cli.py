"""The command line: ``gradpilot COMMAND``. Exit code 0: done, 1: failed, 2: wrong usage."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gradpilot
from gradpilot.errors import GradpilotError
from gradpilot.program import exit_code

if TYPE_CHECKING:
    from gradpilot.operate import OperatorClient
    from gradpilot.protos.messages import Decision, RunRef, RunSummary

DEFAULT_ADDRESS = "127.0.0.1:47800"

# Commands that are programs of their own: their arguments are parsed where they are used, and a
# missing extra only matters to them.
_PROGRAMS: dict[str, tuple[str, str, str]] = {
    "controller": ("gradpilot.controller.server", "controller", "run the controller"),
    "demo": ("gradpilot.demo.run", "demo", "train on this machine over an emulated link"),
    "simulate": ("gradpilot.simulate.run", "controller", "try policies on a simulated network"),
    "replay": ("gradpilot.simulate.replay", "controller", "take stored decisions again"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _PROGRAMS:
        return _run_program(*_PROGRAMS[arguments[0]][:2], arguments[1:])
    parsed = _parser().parse_args(arguments)
    return exit_code("gradpilot", lambda: int(parsed.command(parsed)))


def _run_program(module: str, extra: str, arguments: list[str]) -> int:
    try:
        program: Callable[[list[str]], int] = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "gradpilot":
            raise
        print(
            f"gradpilot: {error.name} is missing; pip install 'gradpilot[{extra}]'", file=sys.stderr
        )
        return 1
    return program(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gradpilot", description=gradpilot.__doc__.split("\n")[0])
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, _, text) in _PROGRAMS.items():
        commands.add_parser(name, help=text, add_help=False)

    operator = argparse.ArgumentParser(add_help=False)
    operator.add_argument(
        "--address",
        default=os.environ.get("GRADPILOT_CONTROLLER") or DEFAULT_ADDRESS,
        help="host:port of the controller (GRADPILOT_CONTROLLER, else %(default)s)",
    )
    operator.add_argument("--output", choices=("text", "json"), default="text")
    one_run = argparse.ArgumentParser(add_help=False, parents=[operator])
    one_run.add_argument("run", help="run id")
    one_run.add_argument("--model", default="", help="model; not needed if the run has one")

    def add(
        name: str, command: Callable[[argparse.Namespace], int], text: str, parent: object
    ) -> argparse.ArgumentParser:
        parents = [parent] if isinstance(parent, argparse.ArgumentParser) else []
        sub = commands.add_parser(name, help=text, description=text, parents=parents)
        sub.set_defaults(command=command)
        return sub

    add("health", _health, "ask whether the controller serves; exit code 0 or 1", operator)
    add("runs", _runs, "list runs", operator)
    add("run", _run, "show one run with its plan and newest decision", one_run)
    explain = add("explain", _explain, "say why a plan was chosen", one_run)
    explain.add_argument("--decision", type=int, default=-1, help="its id; the newest if not given")
    add("watch", _watch, "print decisions as they are taken", one_run)
    pin = add("pin", _pin, "give all buckets one option", one_run)
    pin.add_argument("option", nargs="+", help="such as: bf16, or: topk ratio=0.01 ...")
    add("unpin", _order, "let the policy choose again", one_run).set_defaults(order="unpin")
    add("freeze", _order, "keep the present plan", one_run).set_defaults(order="freeze")
    add("resume", _order, "take decisions again", one_run).set_defaults(order="resume")
    policies = add("policies", _policies, "list policies: what decides, and by what", None)
    policies.add_argument("--output", choices=("text", "json"), default="text")
    for name, text in (
        ("compressors", "list compressors with their settings"),
        ("collectives", "list what can carry a compressor's payloads"),
    ):
        listing = add(name, _listing, text, None)
        listing.add_argument("--output", choices=("text", "json"), default="text")
        listing.set_defaults(listing=name)
    diagnose = add("diagnose", _diagnose, "name the rank that holds a stuck job up", None)
    diagnose.add_argument("folder", metavar="DIR", help="where the watchdogs left their dumps")
    diagnose.add_argument("--output", choices=("text", "json"), default="text")
    add("version", _version, "print the version", None)
    return parser


# --- commands ----------------------------------------------------------------------------------


def _health(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        healthy = client.healthy()
    if arguments.output == "json":
        print(f'{{"serving": {str(healthy).lower()}}}')
    else:
        print("serving" if healthy else "not serving")
    return 0 if healthy else 1


def _runs(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        runs = client.runs()
    if arguments.output == "json":
        _print_json(runs)
        return 0
    row = "{:24} {:10} {:9} {:>7} {:>8} {:>9}  {}"
    print(row.format("RUN", "MODEL", "STATE", "RANKS", "STEP", "STEP TIME", "PLAN"))
    for run in runs:
        print(row.format(*_summary_cells(run)))
    return 0


def _run(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        detail = client.run(_ref(arguments))
    if arguments.output == "json":
        _print_json(detail)
        return 0
    names = ("run", "model", "state", "ranks", "step", "step time", "plan")
    for name, cell in zip(names, _summary_cells(detail.summary), strict=True):
        print(f"{name + ':':12}{cell}")
    if detail.summary.pinned or detail.summary.frozen:
        print(f"{'held:':12}{detail.summary.pinned or 'frozen'}")
    if detail.layout is not None:
        elements = detail.layout.elements
        print(f"{'layout:':12}{len(detail.layout.buckets)} buckets, {elements:,} elements")
    if detail.decision is not None:
        _print_decision(detail.decision)
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    from gradpilot.explain import as_json, lines

    with _client(arguments) as client:
        decision = client.explain(_ref(arguments))
    print(as_json(decision) if arguments.output == "json" else "\n".join(lines(decision)))
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        for decision in client.watch(_ref(arguments)):
            if arguments.output == "json":
                _print_json(decision)
            else:
                _print_decision(decision)
            sys.stdout.flush()
    return 0


def _pin(arguments: argparse.Namespace) -> int:
    from gradpilot.protos.option_text import parse_option

    option = parse_option(" ".join(arguments.option))
    with _client(arguments) as client:
        print(client.pin(arguments.run, arguments.model, option).detail)
    return 0


def _order(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        print(getattr(client, arguments.order)(_ref(arguments)).detail)
    return 0


def _policies(arguments: argparse.Namespace) -> int:
    import inspect
    import json

    from gradpilot.policies.base import POLICIES

    entries = [
        {
            "name": name,
            "summary": (inspect.getdoc(policy) or "").split("\n")[0],
            "source": policy.source,
            "grain": policy.grain,
            "uses": policy.uses,
        }
        for name, policy in ((name, POLICIES.get(name)) for name in POLICIES)
    ]
    if arguments.output == "json":
        print(json.dumps(entries))
        return 0
    for entry in entries:
        print(f"{entry['name']:12} {entry['summary']}")
        print(f"  {entry['grain']}; {entry['source']}")
        print(f"  uses {', '.join(entry['uses']) or 'nothing measured'}")
    return 0


def _listing(arguments: argparse.Namespace) -> int:
    import json

    try:
        from gradpilot.worker_agent import listing
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise GradpilotError("torch is missing; pip install 'gradpilot[torch]'") from None
    entries = getattr(listing, arguments.listing)()
    if arguments.output == "json":
        print(json.dumps(entries, allow_nan=False))
        return 0
    show = _print_compressor if arguments.listing == "compressors" else _print_collective
    for entry in entries:
        show(entry)
    return 0


def _diagnose(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from gradpilot.diagnose import report, show

    show(*report(Path(arguments.folder)), arguments.output)
    return 0


def _version(arguments: argparse.Namespace) -> int:
    print(f"gradpilot {gradpilot.__version__}")
    return 0


# --- output ------------------------------------------------------------------------------------


def _client(arguments: argparse.Namespace) -> OperatorClient:
    from gradpilot.operate import OperatorClient

    return OperatorClient(arguments.address)


def _ref(arguments: argparse.Namespace) -> RunRef:
    from gradpilot.protos.messages import RunRef

    return RunRef(arguments.run, arguments.model, getattr(arguments, "decision", -1))


def _summary_cells(run: RunSummary) -> tuple[str, ...]:
    plan = run.plan_label + (" (pinned)" if run.pinned else " (frozen)" if run.frozen else "")
    return (
        run.run,
        run.model,
        run.state,
        f"{run.ranks}/{run.world_size}",
        str(run.step),
        f"{1e3 * run.step_seconds:.1f} ms",
        plan,
    )


def _print_decision(decision: Decision) -> None:
    from gradpilot.explain import headline

    print(headline(decision))
    print(f"  {decision.reason}")


def _print_compressor(entry: Mapping[str, Any]) -> None:
    traits = entry["traits"]
    print(f"{entry['name']:12} {entry['summary']}")
    print(f"  {traits['estimator']}, by {', '.join(traits['collectives'])}; {entry['source']}")
    for setting in entry["settings"]:
        print(f"  {setting['name']}={setting['default']}: {setting['text']}")


def _print_collective(entry: Mapping[str, Any]) -> None:
    most = ", ".join(f"{skip} of {n} ranks" for n, skip in entry["most_skipped"].items())
    skips = f"; most skipped steps: {most}" if most else ""
    print(f"{entry['name']:16} {entry['summary']}{skips}")


def _print_json(value: object) -> None:
    from gradpilot.protos.jsoncodec import to_json

    if isinstance(value, tuple):
        print("[" + ", ".join(to_json(item) for item in value) + "]")
    else:
        print(to_json(value))

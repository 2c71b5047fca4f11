"""``gradpilot replay``: take a stored decision again, or ask another policy."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from gradpilot.controller.config import ControllerConfig, state_path
from gradpilot.controller.errors import StoreError
from gradpilot.controller.store import Store
from gradpilot.errors import ConfigError
from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.guards import settle
from gradpilot.policies.options import current_options
from gradpilot.program import exit_code
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import Candidate, Decision, Option, Plan

EXIT_DIFFERENT = 1
"""Exit code if a decision does not come out as it is stored."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A stored decision and the same inputs decided again.

    Attributes:
        stored: What is stored.
        policy: Who decided again.
        outcome: What came out.
        differences: Fields that differ; empty if all are equal bit for bit.
    """

    stored: Decision
    policy: str
    outcome: Outcome
    differences: tuple[str, ...]


def replay(stored: Decision, policy: str = "") -> Replayed:
    """Decide again from stored inputs.

    Args:
        stored: A decision with its inputs.
        policy: Name of the policy; the one that decided if empty.

    Raises:
        ConfigError: An operator's order has no inputs, or there is no such policy.
        ProtocolError: The inputs are those of another version.
    """
    if not stored.inputs_json:
        raise ConfigError(
            f"decision {stored.id} is {stored.outcome}: it was not taken from measurements"
        )
    name = policy or stored.policy
    inputs = from_json(Inputs, stored.inputs_json)
    answer = settle(POLICIES.get(name)().decide(inputs), inputs)
    # Through text and back, as the controller keeps it.
    outcome = from_json(Outcome, to_json(answer))
    return Replayed(stored, name, outcome, tuple(_differences(stored, inputs, outcome)))


def _differences(stored: Decision, inputs: Inputs, outcome: Outcome) -> list[str]:
    """Compare everything that is stored of an outcome."""
    pairs: dict[str, tuple[object, object]] = {
        name: (getattr(stored, name), getattr(outcome, name))
        for name in ("outcome", "reason", "link", "current", "chosen", "front")
    }
    options = _options(stored.plan, inputs)
    pairs["options"] = (options, outcome.options)
    return [name for name, (old, new) in pairs.items() if _text(old) != _text(new)]


def _options(plan: Plan | None, inputs: Inputs) -> tuple[Option, ...]:
    return () if plan is None else current_options(replace(inputs, current=plan))


def _text(value: object) -> str:
    """Return text that is equal for values with the same bits."""
    if isinstance(value, tuple):
        return "[" + ",".join(map(_text, value)) + "]"
    return to_json(value) if not isinstance(value, str) else value


# --- the state file ----------------------------------------------------------------------------


def load(state: Path, run: str, model: str, id_: int) -> Decision:
    """Return a stored decision, the newest if ``id_`` is negative.

    Reads a copy: opening the file itself would begin a new term of the controller that owns it.

    Raises:
        ConfigError: There is no such file, run, model or decision; says which there are.
        StoreError: The file is no state file.
    """
    if not state.is_file():
        raise ConfigError(f"there is no state file {state}; --state names it")
    with tempfile.TemporaryDirectory(prefix="gradpilot-replay-") as folder:
        copy = Path(folder) / "state.sqlite3"
        for suffix in ("", "-wal"):  # what a running controller has not merged yet
            part = Path(f"{state}{suffix}")
            if part.is_file():
                shutil.copyfile(part, f"{copy}{suffix}")
        return asyncio.run(_load(copy, run, model, id_))


async def _load(state: Path, run: str, model: str, id_: int) -> Decision:
    store = Store(str(state))
    try:
        await store.open()
        return await find(store, run, model, id_)
    except StoreError as error:  # names the copy
        raise StoreError(str(error).replace(f" {state}", "")) from None
    finally:
        await store.close()


async def find(store: Store, run: str, model: str, id_: int) -> Decision:
    """Return a decision of an open store; see ``load``."""
    known = await store.runs()
    models = [stored.model for stored in known if stored.run == run]
    if not models:
        names = ", ".join(dict.fromkeys(repr(stored.run) for stored in known)) or "none"
        raise ConfigError(f"the state file has no run {run!r}; it has: {names}")
    if not model and len(models) > 1:
        raise ConfigError(f"run {run!r} has models {', '.join(models)}; --model names one")
    wanted = model or models[0]
    found = await store.decision(run, wanted, id_)
    if found is None:
        which = f"decision {id_}" if id_ >= 0 else "decision"
        raise ConfigError(f"run {run!r} model {wanted!r} has no {which} in the state file")
    return found


# --- command -----------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run the command; 0: equal (or another policy was asked), 1: different or failed, 2: usage."""
    arguments = _parser().parse_args(argv)
    return exit_code("gradpilot replay", lambda: _run(arguments, sys.stdout))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradpilot replay", description=(__doc__ or "").split(": ", 1)[1]
    )
    parser.add_argument("run", help="run id")
    parser.add_argument("--model", default="", help="model; not needed if the run has one")
    parser.add_argument("--decision", type=int, default=-1, help="its id; the newest if not given")
    parser.add_argument(
        "--policy", default="", help="ask this one; the one that decided if not given"
    )
    parser.add_argument(
        "--state",
        default=os.environ.get("GRADPILOT_STATE", ""),
        help="the controller's state file (GRADPILOT_STATE, else where the controller puts it)",
    )
    parser.add_argument("--output", default="text", choices=("text", "json"))
    return parser


def _run(arguments: argparse.Namespace, out: TextIO) -> int:
    if arguments.policy and arguments.policy not in POLICIES.names():
        known = ", ".join(POLICIES.names())
        raise ConfigError(f"unknown policy {arguments.policy!r}; known: {known}")
    state = Path(arguments.state or state_path(ControllerConfig(), os.environ))
    stored = load(state, arguments.run, arguments.model, arguments.decision)
    done = replay(stored, arguments.policy)
    if arguments.output == "json":
        found = {
            "run": stored.run,
            "model": stored.model,
            "decision": stored.id,
            "step": stored.step,
            "stored": {"policy": stored.policy, "outcome": stored.outcome, "reason": stored.reason},
            "replayed": {"policy": done.policy, **json.loads(to_json(done.outcome))},
            "equal": not done.differences,
            "differences": list(done.differences),
        }
        out.write(json.dumps(found, allow_nan=False) + "\n")
    else:
        _tell(done, out)
    same = done.policy == stored.policy
    return EXIT_DIFFERENT if same and done.differences else 0


def _tell(done: Replayed, out: TextIO) -> None:
    stored = done.stored
    out.write(f"decision {stored.id} of {stored.run} {stored.model} at step {stored.step}\n")
    out.write(f"  stored, {stored.policy}: {stored.outcome}\n      {stored.reason}\n")
    out.write(f"  now, {done.policy}: {done.outcome.outcome}\n      {done.outcome.reason}\n")
    for word, chosen in (("stored", stored.chosen), ("now", done.outcome.chosen)):
        if chosen is not None:
            out.write(f"  best option, {word}: {_candidate(chosen)}\n")
    if not done.differences:
        out.write("equal bit for bit\n")
    else:
        out.write(f"different: {', '.join(done.differences)}\n")


def _candidate(chosen: Candidate) -> str:
    labels = " + ".join(dict.fromkeys(option.label for option in chosen.options))
    return (
        f"{labels}, {1e3 * chosen.step_seconds:.1f} ms a step at efficiency {chosen.efficiency:.3f}"
    )

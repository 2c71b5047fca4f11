"""Try the claims of the papers behind gradpilot with gradpilot's own code.

    python -m bench.claims [--only T8,T10] [--quick] [--output json]

Claims are tried by virtual ranks in one process, or by the cost model where a shaped network would
be needed (those say ``by model``). Every number stands beside what it should be and how far off it
may be; one that is further off stays in the table, with the reason. The whole run writes
``bench/results/claims.json``; a part of it, or ``--quick`` (fewer samples and steps, whose
accuracies mean nothing), writes no file.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import results_file
from bench.claims import accuracy, adaptive, cost, deciding, quantizing, selection, skipping
from bench.claims.checks import SEEDS, Check, Claim, Finding
from bench.claims.training import dataset

COMMAND = "python -m bench.claims"
MODULES = (cost, selection, skipping, accuracy, quantizing, deciding, adaptive)


@dataclass(frozen=True, slots=True)
class Tried:
    """A claim, what came out, and how long it took."""

    claim: Claim
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def failed(self) -> tuple[Check, ...]:
        """Return the checks that do not hold."""
        return tuple(f for f in self.findings if isinstance(f, Check) and not f.holds)


def claims() -> tuple[Claim, ...]:
    """Return all claims by number."""
    return tuple(sorted((c for m in MODULES for c in m.CLAIMS), key=lambda c: int(c.key[1:])))


def select(keys: str) -> tuple[Claim, ...]:
    """Return the claims that a comma-separated list names, all if it is empty.

    Raises:
        ValueError: There is no such claim.
    """
    known = {claim.key: claim for claim in claims()}
    wanted = [key.strip().upper() for key in keys.split(",") if key.strip()]
    unknown = [key for key in wanted if key not in known]
    if unknown:
        raise ValueError(f"no claim {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(known[key] for key in known if key in wanted or not wanted)


def attempt(claim: Claim, quick: bool) -> Tried:
    """Try a claim."""
    started = time.monotonic()
    findings = tuple(claim.findings(quick))
    return Tried(claim, findings, time.monotonic() - started)


def rows(tried: Iterable[Tried]) -> list[dict[str, Any]]:
    """Return a row for every number, checks and figures in the order in which they came."""
    return [row for one in tried for row in _rows(one)]


def _rows(one: Tried) -> Iterator[dict[str, Any]]:
    for finding in one.findings:
        row: dict[str, Any] = {
            "claim": one.claim.key,
            "how": one.claim.how,
            "source": one.claim.source,
            "what": finding.what,
            "measured": _finite(finding.measured),
        }
        if isinstance(finding, Check):
            row["expected"] = finding.expected
            row["tolerance"] = finding.tolerance
            row["holds"] = finding.holds
            if finding.note and not finding.holds:
                row["note"] = finding.note
        yield row
    yield {"claim": one.claim.key, "what": "time to try it, s", "measured": round(one.seconds, 1)}


def verdicts(tried: Iterable[Tried]) -> list[dict[str, Any]]:
    """Return the verdict of every check."""
    return [
        results_file.verdict(
            f"{one.claim.key} ({one.claim.how}) {check.what}",
            _target(check),
            _finite(check.measured),
            check.holds,
        )
        for one in tried
        for check in one.findings
        if isinstance(check, Check)
    ]


def _target(check: Check) -> str:
    if check.tolerance in ("at most", "at least"):
        return f"{check.tolerance} {check.expected:.6g}"
    return f"{check.expected:.6g}, {check.tolerance}"


def _finite(value: float) -> float | str:
    """Return a number that JSON can hold, or its name."""
    return value if math.isfinite(value) else str(value)


def text(one: Tried) -> str:
    """Return a claim and its numbers as a table for people."""
    word = "DOES NOT HOLD" if one.failed else "holds"
    lines = [f"{one.claim.key} {word} ({one.claim.how}, {one.seconds:.0f} s): {one.claim.title}"]
    for finding in one.findings:
        if isinstance(finding, Check):
            mark = "ok " if finding.holds else "NO "
            target = f"   [{_target(finding)}]"
        else:
            mark, target = " . ", ""
        lines.append(f"  {mark} {finding.what}: {finding.measured:.5g}{target}")
    notes = dict.fromkeys(check.note for check in one.failed if check.note)
    lines += [f"      {note}" for note in notes]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, path: Path | None = None) -> int:
    """Try claims, print what came out, write the result file.

    Args:
        argv: Arguments of the command line.
        path: Another place for the result file.

    Returns:
        0, whatever holds: a claim that does not is a result. 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--only", default="", help="comma-separated claims, such as T8,T10")
    parser.add_argument("--quick", action="store_true", help="few samples and steps, no file")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    arguments = parser.parse_args(argv)
    try:
        wanted = select(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    tried = []
    for claim in wanted:
        tried.append(attempt(claim, arguments.quick))
        if arguments.output == "text":
            print(text(tried[-1]), flush=True)
    document = {"rows": rows(tried), "verdicts": verdicts(tried)}
    if not arguments.quick and len(wanted) == len(claims()):
        document["rows"].append({"what": "data set", "measured": dataset().name})
        written = results_file.write("claims", COMMAND, SEEDS, **document, path=path)
        document = json.loads(written.read_text(encoding="utf-8"))
    if arguments.output == "json":
        print(json.dumps(document, indent=1))
    else:
        failed = sum(len(one.failed) for one in tried)
        total = len(document["verdicts"])
        print(f"{total - failed} of {total} checks hold, in {len(tried)} claims")
    return 0

"""The one format of result files, how they are written and how they are checked.

A file holds ``schema, created, command, machine, versions, seeds, rows, verdicts``. Rows are what
was measured, flat objects; a verdict is ``{name, target, measured, holds}`` for each figure that an
issue or a document claims. A verdict that does not hold stays in the file.

    python -m bench.results_file FILE ...    # checks files
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA = 1
RESULTS = Path(__file__).parent / "results"

PACKAGES = ("gradpilot", "torch", "numpy", "pymoo", "grpcio", "protobuf")

_FIELDS: dict[str, type] = {
    "schema": int,
    "created": str,
    "command": str,
    "machine": dict,
    "versions": dict,
    "seeds": list,
    "rows": list,
    "verdicts": list,
}


def verdict(name: str, target: str, measured: float | str, holds: bool) -> dict[str, Any]:
    """Return a verdict.

    Args:
        name: What is claimed, with its unit: ``exact enumeration, ms``.
        target: The claim: ``< 20``.
        measured: What came out.
        holds: Whether the claim is true of it.
    """
    return {"name": name, "target": target, "measured": measured, "holds": bool(holds)}


def judged(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for people of every verdict."""
    return [
        f"{'holds' if v['holds'] else 'DOES NOT HOLD'}: {v['name']} {v['target']}: {v['measured']}"
        for v in verdicts
    ]


def write(
    name: str,
    command: str,
    seeds: Sequence[int],
    rows: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    path: Path | None = None,
) -> Path:
    """Write a result file.

    Args:
        name: Name of the benchmark; the file is ``bench/results/NAME.json``.
        command: How to repeat it.
        seeds: Every seed used.
        rows: Measurements.
        verdicts: See ``verdict``.
        path: Another place for the file.

    Returns:
        Where it was written.

    Raises:
        ValueError: The document does not follow the format; nothing was written.
    """
    document = {
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine(),
        "versions": versions(),
        "seeds": list(seeds),
        "rows": [dict(row) for row in rows],
        "verdicts": [dict(one) for one in verdicts],
    }
    problems = check(document)
    if problems:
        raise ValueError(f"result {name!r} is not well-formed: " + "; ".join(problems))
    target = path if path is not None else RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return target


def machine() -> dict[str, Any]:
    """Return what a reader must know of the machine; no names of hosts or users."""
    model = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cpus": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter, as far as installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def check(document: object) -> list[str]:
    """Return what is wrong with a result document; empty if nothing is."""
    if not isinstance(document, dict):
        return [f"must be an object, got {type(document).__name__}"]
    problems = [f"field {name!r} is missing" for name in _FIELDS if name not in document]
    problems += [f"field {name!r} is unknown" for name in document if name not in _FIELDS]
    for name, kind in _FIELDS.items():
        if name in document and not _is(document[name], kind):
            problems.append(f"{name} must be {kind.__name__}, got {document[name]!r}")
    if problems:
        return problems
    if document["schema"] != SCHEMA:
        problems.append(f"schema must be {SCHEMA}, got {document['schema']}")
    try:
        if datetime.fromisoformat(document["created"]).tzinfo is None:
            problems.append("created must name its time zone")
    except ValueError:
        problems.append(f"created must be an ISO date, got {document['created']!r}")
    problems += [f"{name} must not be empty" for name in ("command", "rows") if not document[name]]
    if "python" not in document["versions"]:
        problems.append("versions must name python")
    if not all(_is(seed, int) for seed in document["seeds"]):
        problems.append(f"seeds must be integers, got {document['seeds']}")
    for i, row in enumerate(document["rows"]):
        if not (isinstance(row, dict) and row and all(_flat(v) for v in row.values())):
            problems.append(f"rows[{i}] must be an object of numbers, strings and lists of them")
    for i, one in enumerate(document["verdicts"]):
        problems += [f"verdicts[{i}] {problem}" for problem in _verdict_problems(one)]
    return problems


def _verdict_problems(one: object) -> list[str]:
    if not isinstance(one, dict) or set(one) != {"name", "target", "measured", "holds"}:
        return ["must have exactly name, target, measured, holds"]
    problems = []
    for name in ("name", "target"):
        if not (isinstance(one[name], str) and one[name]):
            problems.append(f"{name} must be a text, got {one[name]!r}")
    if isinstance(one["measured"], list) or one["measured"] is None or not _flat(one["measured"]):
        problems.append(f"measured must be a finite number or a text, got {one['measured']!r}")
    if not isinstance(one["holds"], bool):
        problems.append(f"holds must be true or false, got {one['holds']!r}")
    return problems


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _flat(value: object) -> bool:
    """Return whether a value is a finite number, a text, a truth, null, or a list of such."""
    if isinstance(value, list):
        return all(not isinstance(v, list) and _flat(v) for v in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (bool, int, str))


def main(paths: Sequence[str]) -> int:
    """Check files and say what is wrong with them; return 1 if something is."""
    wrong = 0
    for path in paths:
        try:
            problems = check(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            problems = [str(error)]
        print(f"{path}: {'; '.join(problems) or 'well-formed'}")
        wrong |= bool(problems)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

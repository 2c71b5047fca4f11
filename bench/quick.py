"""A small part of the benchmarks that need emulated hosts, with all their checks.

    python -m bench.quick [--small] [--only tta,skip,network_model]

Results go to ``build/quick``, never to ``bench/results``: so few steps and repetitions tell whether
a benchmark works, not how fast anything is. It fails if a program fails, if a result file does not
follow its format, or if a check of correctness does not hold (ranks in sync, nothing lost); a
target of speed that is missed is no failure. ``--small`` is the size for CI.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import results_file
from bench.netlab import missing

FOLDER = Path("build") / "quick"
REQUIRE_ALL = "GRADPILOT_REQUIRE_ALL"
GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark.

    Attributes:
        arguments: Of ``python -m bench.NAME``; ``--result FILE`` is added.
        small: Further ones of ``--small``.
        seconds: It is ended after so many; several times what it takes on two cores.
        must_hold: Verdicts of correctness: their names begin so. There must be one of each.
    """

    arguments: tuple[str, ...]
    small: tuple[str, ...] = ()
    seconds: float = 300.0
    must_hold: tuple[str, ...] = ()


PARTS = {
    "tta": Part(
        # Rows that were made before say nothing of this version.
        ("--quick", "--again", "--folder", str(FOLDER / "tta")),
        ("--rows", "cnn/*/bf16,adaptive", "--steps", "24"),
        seconds=900.0,
        must_hold=("ranks in sync", "sent + residual == corrected"),
    ),
    "skip": Part(("--quick",), ("--part", "time")),
    "network_model": Part(("--quick",)),
}
"""By the name of the module in ``bench``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts one after another.

    Returns:
        0 if all is well, or if this machine can have no emulated hosts and need not; 1 if not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.quick", description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument(
        "--small", action="store_true", help="two and a half minutes instead of five"
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    arguments = parser.parse_args(argv)
    wanted = arguments.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if lacking := missing():
        needed = os.environ.get(REQUIRE_ALL) == "1"
        word = f"needed, since {REQUIRE_ALL}=1" if needed else "skipped"
        print(f"bench.quick: {word}: {'; '.join(lacking)}", file=sys.stderr)
        return 1 if needed else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    wrong = []
    for name in wanted:
        begun = time.monotonic()
        problems = run(name, PARTS[name], arguments.small)
        word = "; ".join(problems) if problems else "well"
        print(f"bench.quick: {name}: {word}, {time.monotonic() - begun:.0f} s", flush=True)
        wrong += problems
    return 1 if wrong else 0


def run(name: str, part: Part, small: bool, folder: Path = FOLDER) -> list[str]:
    """Run a part and return what is wrong.

    Args:
        name: Module in ``bench``.
        part: What to run.
        small: Whether in the size for CI.
        folder: Where its result file and its output go.
    """
    result = folder / f"{name}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"bench.{name}", *part.arguments]
    command += [*(part.small if small else ()), "--result", str(result)]
    log = folder / f"{name}.txt"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            return [f"was not over after {part.seconds:.0f} s, see {log}"]
        finally:
            _end(process)
    problems = [] if code == 0 else [f"ended with {code}, see {log}"]
    return problems + judge(result, part)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that is still there, which takes its labs down when it is asked to end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def judge(path: Path, part: Part) -> list[str]:
    """Return what is wrong with a result file.

    Args:
        path: The file.
        part: What made it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"no result: {error}"]
    problems = results_file.check(document)
    if problems:
        return problems
    found = []
    for begins in part.must_hold:
        verdicts = [one for one in document["verdicts"] if one["name"].startswith(begins)]
        if not verdicts:
            found.append(f"nobody looked whether {begins!r} holds")
        found += [f"{one['name']}: {one['measured']}" for one in verdicts if not one["holds"]]
    return found


if __name__ == "__main__":
    raise SystemExit(main())

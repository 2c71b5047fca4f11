"""How many steps compression costs, and which statistic foretells it.

    python -m bench.efficiency [--work FILE] [--quick] [--output json]

Two tasks (a small CNN on images, the next character of a text) are trained on four virtual ranks
with every compressor that loses something and with skipped ring steps, at learning rates searched
for each method, with five seeds. The efficiency of a method is the steps that dense training needs
to a loss, over the steps that the method needs. Beside it stand statistics of the gradient, how
well each orders the methods, exponents of gain by family, and what foretells divergence.

Trainings are kept in the work file, one a line, and are not done again, so the run can be
interrupted. The whole takes about half an hour of one core and writes
``bench/results/efficiency.json``; ``--quick`` does few short trainings, which say nothing, and
writes no file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import results_file
from bench.efficiency_runs.methods import named
from bench.efficiency_runs.report import findings, rows, text, verdicts
from bench.efficiency_runs.sweep import Archive, Plan, sweep
from bench.efficiency_runs.tasks import TASKS

COMMAND = "python -m bench.efficiency"
WORK = Path("build/efficiency.jsonl")

QUICK = Plan(
    steps=50,
    seeds=(0, 1),
    methods=tuple(map(named, ("topk 0.1", "topkc 0.01", "skip 2 of 4, divisor skip"))),
    stressed=("topkc 0.01",),
    as_is=1,
)
"""Enough to go through everything."""


def main(
    argv: Sequence[str] | None = None, path: Path | None = None, plan: Plan | None = None
) -> int:
    """Train, print what came out, write the result file.

    Args:
        argv: Arguments of the command line.
        path: Another place for the result file.
        plan: Another amount of work.

    Returns:
        0, whatever came out. 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=(__doc__ or "").split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--work", type=Path, default=WORK, help="keeps what was trained")
    parser.add_argument("--quick", action="store_true", help="few short trainings, no file")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    plan = plan or (QUICK if arguments.quick else Plan())
    try:
        archive = Archive(None if arguments.quick else arguments.work, plan.steps)
    except ValueError as error:
        parser.error(str(error))
    began, before = time.process_time(), len(archive.all)
    for _ in sweep(archive, [make() for make in TASKS.values()], plan):
        done = len(archive.all)
        if arguments.output == "text" and done > before and done % 50 == 0:
            print(f"{done} trainings, {time.process_time() - began:.0f} s of CPU", flush=True)
            before = done
    table = rows(findings(archive.all, plan))
    judged = verdicts(table)
    if not arguments.quick:
        written = results_file.write("efficiency", COMMAND, plan.seeds, table, judged, path=path)
        document = json.loads(written.read_text(encoding="utf-8"))
    else:
        document = {"rows": table, "verdicts": judged}
    if arguments.output == "json":
        print(json.dumps(document, indent=1, allow_nan=False))
        return 0
    print(text(table))
    for one in judged:
        mark = "ok" if one["holds"] else "NO"
        print(f"{mark} {one['name']}: {one['measured']} [{one['target']}]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

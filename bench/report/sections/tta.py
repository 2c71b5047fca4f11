"""Time to accuracy: methods and policies on emulated hosts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.report.results import Result, Row, table
from bench.report.section import Headline, Section
from bench.tta.networks import NETWORKS

TEXT = """
`bench.tta` trains one task under several methods with the same seeds, data order and
hyper-parameters, on emulated hosts ([netlab.md](netlab.md)) that have links of the wanted rate
and latency, and takes accuracy and time from the same run. The controller's traffic goes over
these links, too. Shown is the hardest target that bf16 reaches in every seed, so that no method
chooses it; a metric is smoothed by the mean of three evaluations. `python -m bench.tta --list`
has all rows and how long they would take; finished rows are kept, so the matrix can be made in
pieces, and `make bench-quick` makes a few short ones.

{trainings} trainings of {tasks} with {ranks} ranks: {networks}; seeds {seeds}. At {in_sync}
sampled steps all ranks had equal parameters, at {conserved} nothing was lost or sent twice; other
programs took at most {others} of the processors. What `--list` has beyond these has not been run,
for want of time.

{groups}

{targets}
"""

REASONS = {
    "^cnn, c1: (bf16|best .*) / adaptive": "it stays with PowerSGD in the fast phases: payloads so"
    " small say nothing of a bandwidth that grew, and no probe is asked for until latency changes",
    "other programs": "the machine was not quiet",
}


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    rows = result.rows(kind="training")
    by_task = {
        task: list(dict.fromkeys(row["network"] for row in rows if row["task"] == task))
        for task in dict.fromkeys(row["task"] for row in rows)
    }
    return {
        "trainings": f"{len(rows)}",
        "tasks": " and ".join(f"`{task}`" for task in by_task),
        "ranks": " or ".join(str(n) for n in sorted({row["ranks"] for row in rows})),
        "networks": "; ".join(
            f"{task} on {', '.join(f'`{name}`' for name in names)}"
            for task, names in by_task.items()
        ),
        "seeds": ", ".join(str(seed) for seed in result.document["seeds"]),
        "in_sync": _counted(rows, "sync_checks"),
        "conserved": _counted(rows, "conserved_checks"),
        "others": f"{100 * max(row['others_cpu'] for row in rows):.1f} %",
        "groups": "\n\n".join(_groups(result)),
    }


def headlines(result: Result) -> list[Headline]:
    """Return how `adaptive` did on networks that change and on those that do not."""
    kinds = (
        (r": bf16 / adaptive", "bf16's time to accuracy / `adaptive`'s, changing networks"),
        (r": best .* / adaptive", "best static method's / `adaptive`'s, changing networks"),
        (r": adaptive / best", "`adaptive`'s / best static method's, constant networks"),
        (r": adaptive / oracle", "`adaptive`'s / the oracle's, changing networks"),
        (r": final ", "`adaptive` behind dense in the end, worst seed, points or %"),
    )
    found = []
    for pattern, words in kinds:
        verdicts = result.matching(pattern)
        if not verdicts:
            continue
        values = [one["measured"] for one in verdicts if not isinstance(one["measured"], str)]
        lost = len(verdicts) - len(values)
        shown = _spread(values) + (f"; {lost} not reached" if lost else "")
        met = sum(one["holds"] for one in verdicts)
        wanted = " or ".join(dict.fromkeys(one["target"] for one in verdicts))
        found.append(
            (words, wanted, f"{shown} ({met} of {len(verdicts)} met)", met == len(verdicts))
        )
    return found


def _spread(values: list[float]) -> str:
    if len(values) < 3:
        return ", ".join(f"{value:.2f}" for value in values)
    median = statistics.median(values)
    return f"median {median:.2f}, {min(values):.2f} to {max(values):.2f}"


def _counted(rows: list[Row], field: str) -> str:
    right, every = (sum(row[field][i] for row in rows) for i in (0, 1))
    return f"{right} of {every}"


def _groups(result: Result) -> Iterator[str]:
    """Yield a table, with its figures, for every task and network."""
    summaries = result.rows(kind="summary")
    for task, network in dict.fromkeys((row["task"], row["network"]) for row in summaries):
        rows = result.rows(kind="summary", task=task, network=network)
        target = rows[0]["target"]
        steps = {row["steps"] for row in result.rows(kind="training", task=task, network=network)}
        wanted = "no common target" if target is None else f"to {target:g}"
        yield f"### {task} on {network}, {' or '.join(str(n) for n in sorted(steps))} steps"
        what = NETWORKS[network].what
        yield f"{what[0].upper()}{what[1:]}."
        yield table(
            ("method", f"{wanted}, s", "least to most", "ms a step", "MB sent", "final", "seeds"),
            [_line(row) for row in rows],
        )
        seed = min(row["seed"] for row in result.rows(kind="training", task=task, network=network))
        for kind, words in (("reached", "accuracy over time"), ("steps", "step times and plans")):
            name = f"tta-{task}-{network}-{seed}-{kind}.svg"
            if (result.folder / "figures" / name).exists():
                yield f"![{task} on {network}: {words}](../bench/results/figures/{name})"


def _line(row: Row) -> tuple[str, ...]:
    median, least, most = (row[f"target_seconds_{name}"] for name in ("median", "least", "most"))
    count = len(row["seeds"])
    never = "not reached" if row["reached"] == 0 else f"{row['reached']} of {count} seeds"
    return (
        row["method"],
        never if median is None or row["target"] is None else f"{median:.1f}",
        "" if most is None or count == 1 else f"{least:.1f} to {most:.1f}",
        f"{row['step_ms']:.0f}",
        f"{row['sent_mb']:,.0f}",
        "diverged" if row["final"] is None else f"{row['final']:.4f}",
        f"{count}",
    )


SECTION = Section(
    position=5,
    title="Time to accuracy",
    result="tta",
    text=TEXT,
    places=places,
    reasons=REASONS,
    headlines=headlines,
)

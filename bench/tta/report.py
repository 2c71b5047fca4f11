"""From finished rows to the result file: what was measured, summaries, and claims that hold or not.

Ratios are of times to one target on one task, network and seed, and then the median over seeds with
the least and the greatest. The target is the hardest one that bf16 (fp32 where there is no bf16)
reaches in every seed, so no method chooses it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench import results_file
from bench.tta.methods import METHODS
from bench.tta.networks import NETWORKS
from bench.tta.reached import final, seconds_to, strictest
from bench.tta.tasks import TASKS

Row = Mapping[str, Any]

OURS = "adaptive"
FASTER_THAN_BF16 = 2.0
FASTER_THAN_STATIC = 1.25
BEHIND_ORACLE = 1.08
BEHIND_STATIC = 1.03
"""Targets: on changing networks the first three, on constant ones the last."""

MOST_OTHERS = 0.2
"""Of the processors, netlab's own processes and the kernel's work on packets included: more, and
times say more of the others than of the method."""

TCP_SHARE = 1448 / 1514
LINK_ERROR = 0.15
"""Share of a link that carries payload, and how far the estimate may be off."""

_KEPT = (
    "task", "network", "method", "seed", "ranks", "steps", "seconds", "attach_seconds",
    "dropped_packets", "background_bytes", "switches", "nonfinite", "frozen", "in_sync",
    "sync_checks", "conserved", "conserved_checks", "evaluated_steps", "values", "plan_steps",
    "plan_seconds", "plans", "late_seconds", "phases_met", "others_cpu",
    "wall_seconds",
)  # fmt: skip


def rows(finished: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows of the result file: a training each, then a summary of each method."""
    return [*map(_training, finished), *_summaries(finished)]


def step_seconds(row: Row) -> list[float]:
    """Return how long every step took, s."""
    ends = row["ends"]
    return [b - a for a, b in zip([0.0, *ends], ends, strict=False)]


def verdicts(finished: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a verdict for every claim that the finished rows allow to judge."""
    found = [
        _counted("ranks in sync, sampled steps", finished, "sync_checks"),
        _quiet(finished),
        _counted("sent + residual == corrected, sampled steps", finished, "conserved_checks"),
    ]
    for (task, network), group in _groups(finished).items():
        found += _compared(task, network, group)
        found += _finals(task, network, group)
        found += _slow_host(task, network, group)
    return found


def text(finished: Sequence[Row], found: Sequence[Mapping[str, Any]]) -> str:
    """Return tables and verdicts for people."""
    lines = []
    for (task, network), group in _groups(finished).items():
        target = _target(group, task)
        lines += ["", f"{task} on {network}: {NETWORKS[network].what}"]
        shown = f"to {target:g}" if target is not None else "no target"
        lines.append(
            f"{'method':16s}{shown + ', s':>14s}{'least':>9s}{'most':>9s}{'ms a step':>11s}"
            f"{'MB sent':>9s}{'final':>9s}{'phases':>8s}{'others %':>10s}{'seeds':>7s}"
        )
        for method, own in group.items():
            one = _summary(task, network, method, own, target)
            seconds = [one[f"target_seconds_{name}"] for name in ("median", "least", "most")]
            lines.append(
                f"{method:16s}{_cell(seconds[0], 14)}{_cell(seconds[1], 9)}{_cell(seconds[2], 9)}"
                f"{one['step_ms']:11.1f}{one['sent_mb']:9.0f}{_cell(one['final'], 9, 4)}"
                f"{one['phases_met']:8d}{100 * one['others_cpu']:10.0f}{len(own):7d}"
            )
    lines.append("")
    for verdict in found:
        word = "holds " if verdict["holds"] else "MISSED"
        lines.append(f"{word} {verdict['name']}: {verdict['measured']} (to be {verdict['target']})")
    return "\n".join(lines)


# --- rows --------------------------------------------------------------------------------------


def _training(row: Row) -> dict[str, Any]:
    task = TASKS[row["task"]]
    milliseconds = [1e3 * s for s in step_seconds(row)]
    deciles = statistics.quantiles(milliseconds, n=10)
    return {
        "kind": "training",
        **{name: row[name] for name in _KEPT},
        "evaluated_seconds": [row["ends"][step] for step in row["evaluated_steps"]],
        "targets": list(task.targets),
        "target_seconds": [_rounded(seconds_to(row, task, t)) for t in task.targets],
        "final": _rounded(final(row), 5),
        "step_ms": round(statistics.median(milliseconds), 2),
        "step_ms_p10": round(deciles[0], 2),
        "step_ms_p90": round(deciles[-1], 2),
        "sent_mb": [round(1e-6 * sent, 3) for sent in row["sent_bytes"]],
    }


def _summaries(finished: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for (task, network), group in _groups(finished).items():
        target = _target(group, task)
        for method, own in group.items():
            yield _summary(task, network, method, own, target)


def _summary(
    task: str, network: str, method: str, own: Sequence[Row], target: float | None
) -> dict[str, Any]:
    reached = [seconds_to(row, TASKS[task], target) for row in own] if target is not None else []
    known = [seconds for seconds in reached if seconds is not None]
    every = bool(known) and len(known) == len(own)
    finals = [value for row in own if (value := final(row)) is not None]
    return {
        "kind": "summary",
        "task": task,
        "network": network,
        "method": method,
        "seeds": [row["seed"] for row in own],
        "target": target,
        "reached": len(known),
        "target_seconds_median": _rounded(statistics.median(known)) if every else None,
        "target_seconds_least": _rounded(min(known)) if known else None,
        "target_seconds_most": _rounded(max(known)) if every else None,
        "step_ms": round(statistics.median(1e3 * s for r in own for s in step_seconds(r)), 2),
        "sent_mb": round(statistics.median(1e-6 * max(r["sent_bytes"]) for r in own), 2),
        "final": _rounded(statistics.median(finals), 5) if len(finals) == len(own) else None,
        "phases_met": min(row["phases_met"] for row in own),
        "others_cpu": max(row["others_cpu"] for row in own),
    }


def _groups(finished: Sequence[Row]) -> dict[tuple[str, str], dict[str, list[Row]]]:
    """Return rows by task and network, and there by method."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in finished:
        group = found.setdefault((row["task"], row["network"]), {})
        group.setdefault(row["method"], []).append(row)
    return found


def _target(group: Mapping[str, Sequence[Row]], task: str) -> float | None:
    return strictest(group.get("bf16", group.get("fp32", ())), TASKS[task])


# --- verdicts ----------------------------------------------------------------------------------


def _compared(
    task: str, network: str, group: Mapping[str, Sequence[Row]]
) -> Iterator[dict[str, Any]]:
    """Yield the verdicts about times."""
    target = _target(group, task)
    if OURS not in group or target is None:
        return
    best = _best_static(group, task, target)
    if NETWORKS[network].changing:
        if "bf16" in group:
            yield _ratio(task, network, group, "bf16", OURS, target, FASTER_THAN_BF16)
        if best is not None:
            yield _ratio(task, network, group, best, OURS, target, FASTER_THAN_STATIC, "best ")
        if "oracle" in group:
            yield _ratio(task, network, group, OURS, "oracle", target, BEHIND_ORACLE)
    elif best is not None:
        yield _ratio(task, network, group, OURS, best, target, BEHIND_STATIC, "", "best ")


def _best_static(group: Mapping[str, Sequence[Row]], task: str, target: float) -> str | None:
    """Return the static method with the least median time, of those that always get there."""
    medians = {}
    for method, own in group.items():
        seconds = [seconds_to(row, TASKS[task], target) for row in own]
        known = [one for one in seconds if one is not None]
        if METHODS[method].kind in ("static", "torch") and len(known) == len(own):
            medians[method] = statistics.median(known)
    return min(medians, key=lambda name: medians[name]) if medians else None


def _ratio(
    task: str,
    network: str,
    group: Mapping[str, Sequence[Row]],
    above: str,
    below: str,
    target: float,
    bound: float,
    above_is: str = "",
    below_is: str = "",
) -> dict[str, Any]:
    """Return the verdict on a ratio of times; ours above means that less is better."""
    by_seed = {
        name: {row["seed"]: seconds_to(row, TASKS[task], target) for row in group[name]}
        for name in (above, below)
    }
    seeds = sorted(set(by_seed[above]) & set(by_seed[below]))
    pairs = [(by_seed[above][seed], by_seed[below][seed]) for seed in seeds]
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    name = f"{task}, {network}: {above_is}{above} / {below_is}{below}, time to {target:g}"
    wanted = f"<= {bound:g}" if above == OURS else f">= {bound:g}"
    if not seeds or len(ratios) < len(seeds):
        text = f"not reached in {len(seeds) - len(ratios)} of {len(seeds)} seeds"
        return results_file.verdict(name, wanted, text, False)
    median = statistics.median(ratios)
    spread = f"median of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f}"
    holds = median <= bound if above == OURS else median >= bound
    return results_file.verdict(f"{name}, {spread}", wanted, round(median, 3), holds)


def _finals(
    task: str, network: str, group: Mapping[str, Sequence[Row]]
) -> Iterator[dict[str, Any]]:
    """Yield the verdict about what is reached in the end."""
    dense = "fp32" if "fp32" in group else "bf16"
    if OURS not in group or dense not in group:
        return
    one = TASKS[task]
    others = {row["seed"]: final(row) for row in group[dense]}
    losses = []
    for row in group[OURS]:
        own, other = final(row), others.get(row["seed"], 0.0)
        if row["seed"] not in others:
            continue
        if own is None or other is None:
            losses.append(float("inf"))
        else:
            losses.append(other - own if one.more_is_better else own / other - 1.0)
    if not losses:
        return
    unit = "points" if one.more_is_better else "%"
    name = f"{task}, {network}: final {one.metric}, {OURS} behind {dense}, {unit}, worst seed"
    worst, bound = max(losses), one.bound
    measured = round(100 * worst, 3) if worst < float("inf") else "diverged"
    yield results_file.verdict(name, f"<= {100 * bound:g}", measured, worst <= bound)


def _slow_host(
    task: str, network: str, group: Mapping[str, Sequence[Row]]
) -> Iterator[dict[str, Any]]:
    """Yield the verdicts on a slow host: it is named, and the link is not taken to be slow."""
    if not NETWORKS[network].last_seconds or OURS not in group:
        return
    newest = [(row, row["decisions"][-1]) for row in group[OURS] if row["decisions"]]
    if not newest:
        return
    named = sum(one["slowest_rank"] == row["ranks"] - 1 for row, one in newest)
    yield results_file.verdict(
        f"{task}, {network}: the newest decision names the slow host, rows",
        "all",
        f"{named} of {len(newest)}",
        named == len(newest),
    )
    true = NETWORKS[network].phases[0].link.rate_mbit * TCP_SHARE
    errors = [one["link_mbit"] / true - 1.0 for _, one in newest]
    worst = max(errors, key=abs)
    yield results_file.verdict(
        f"{task}, {network}: bandwidth of its link estimate beside the link's, %, worst row",
        f"within {100 * LINK_ERROR:g}",
        round(100 * worst, 1),
        abs(worst) <= LINK_ERROR,
    )


def _quiet(finished: Sequence[Row]) -> dict[str, Any]:
    worst = max(row["others_cpu"] for row in finished)
    return results_file.verdict(
        "other programs' share of the processors, %, worst row",
        f"<= {100 * MOST_OTHERS:g}",
        round(100 * worst, 1),
        worst <= MOST_OTHERS,
    )


def _counted(name: str, finished: Sequence[Row], field: str) -> dict[str, Any]:
    right = sum(row[field][0] for row in finished)
    every = sum(row[field][1] for row in finished)
    return results_file.verdict(
        f"{name}, all rows", "all", f"{right} of {every}", 0 < right == every
    )


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _cell(value: float | None, width: int, digits: int = 1) -> str:
    return f"{'-':>{width}s}" if value is None else f"{value:{width}.{digits}f}"

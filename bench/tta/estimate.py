"""How long rows will take: as such rows took before, or else by a rough model.

Rows that were made, in the folder of rows or in the committed result file, count by the time of one
step and by what a row needs besides. Where there is none of the kind the time of a step is

    computing + max(bytes / rate, rounds * latency)

with the bytes and rounds that a method needs for what it sends, over the mean of a network's phases
(derived here, not measured). Of the rows that were made first (CNN, two networks, five methods) it
foretold 55 to 97 %: it knows nothing of the time that compressing takes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench import results_file
from bench.tta.matrix import Row
from bench.tta.networks import NETWORKS, Phase
from bench.tta.store import Store
from bench.tta.tasks import TASKS

COMPUTING_SECONDS = {"cnn": 0.030, "transformer": 0.030, "mlp": 0.030}
"""Of a step without communication, four ranks on two cores."""

BESIDES_SECONDS = 26.0
"""Of a row beside its training: a lab, processes, evaluations; as it was of the first rows."""

SWEEP_STEPS, SWEEP_SECONDS = 20, 12.0
"""Of the oracle's sweep: steps of an option in a phase, and what a phase needs besides."""

BUCKETS = 4
"""Of a task's model, as many as exchange one after another."""

Known = Mapping[tuple[str, str, str, int], Sequence[tuple[float, float]]]
"""By task, network, method and ranks: seconds of a step, and what the row took besides."""


@dataclass(frozen=True, slots=True)
class _Sends:
    """What a method sends in a step.

    Attributes:
        share: Of the bytes of a dense gradient that is reduced, by each rank.
        rounds: Messages one after another a bucket, for N ranks, in units of N - 1.
    """

    share: float
    rounds: float


_SENDS: Mapping[str, _Sends] = {
    "fp32": _Sends(1.0, 2),
    "fp16-hook": _Sends(0.5, 2),
    "bf16": _Sends(0.5, 2),
    "powersgd": _Sends(0.03, 4),
    "powersgd-1": _Sends(0.01, 4),
    "torch-powersgd": _Sends(0.03, 4 / BUCKETS),
    "topk": _Sends(0.04, 1),
    "artopk": _Sends(0.02, 3),
    "topkc": _Sends(0.06, 3),
    "skip": _Sends(0.67, 2),
}
_POLICY = _Sends(0.3, 2)
"""Of a policy, which may choose any of them."""


def known(store: Store) -> Known:
    """Return what is known of rows that were made."""
    found: dict[tuple[str, str, str, int], list[tuple[float, float]]] = {}
    for row in (*_committed(), *store.every()):
        kind = (row["task"], row["network"], row["method"], row["ranks"])
        besides = row["wall_seconds"] - row["seconds"]
        found.setdefault(kind, []).append((row["seconds"] / row["steps"], besides))
    return found


def _committed() -> Iterable[Mapping[str, Any]]:
    path = results_file.RESULTS / "tta.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["kind"] == "training"]


def seconds(row: Row, known: Known) -> float:
    """Return how long a row will take, without the oracle's sweep.

    Args:
        row: The row.
        known: As of the function of that name.
    """
    same = known.get((row.task, row.network, row.method, row.ranks))
    every = [besides for rows in known.values() for _, besides in rows]
    if same:
        step = statistics.median(step for step, _ in same)
        besides = statistics.median(besides for _, besides in same)
    else:
        step = step_seconds(row)
        besides = statistics.median(every) if every else BESIDES_SECONDS
    return step * row.steps + besides


def sweep_seconds(row: Row, options: int) -> float:
    """Return how long the oracle's sweep of a task and network will take.

    Args:
        row: A row of the oracle.
        options: How many options it tries.
    """
    phases = {phase.state for phase in NETWORKS[row.network].phases}
    return len(phases) * (SWEEP_SECONDS + options * SWEEP_STEPS * step_seconds(row))


def step_seconds(row: Row) -> float:
    """Return the time of a step by the model, the mean over the phases of the network."""
    network = NETWORKS[row.network]
    sends = _SENDS.get(row.method, _POLICY)
    sent = sends.share * _gradient_bytes(row.task) * 2 * (row.ranks - 1) / row.ranks
    rounds = sends.rounds * (row.ranks - 1) * BUCKETS

    def of(phase: Phase) -> float:
        slowest = min(phase.link.rate_mbit, *(link.rate_mbit for link in network.links(row.ranks)))
        rate = slowest if not network.changing else phase.link.rate_mbit
        left = max(rate - phase.background_mbit, rate / 20)
        return max(8e-6 * sent / left, 0.5e-3 * phase.link.rtt_ms * rounds)

    weights = [phase.seconds if network.changing else 1.0 for phase in network.phases]
    steps = [COMPUTING_SECONDS[row.task] + network.last_seconds + of(p) for p in network.phases]
    # A phase is a time: in it as many steps are made as fit.
    return sum(weights) / sum(w / s for w, s in zip(weights, steps, strict=True))


@cache
def _gradient_bytes(task: str) -> float:
    return 4.0 * sum(parameter.numel() for parameter in TASKS[task].model(0).parameters())


def total(rows: Sequence[Row], known: Known, options: int) -> list[float]:
    """Return how long every row will take; an oracle's first row of a task and network sweeps it.

    Args:
        rows: Rows in the order in which they run.
        known: As of the function of that name.
        options: How many options a sweep tries.
    """
    swept: set[tuple[str, str]] = set()
    found = []
    for row in rows:
        more = 0.0
        if row.method == "oracle" and (row.task, row.network) not in swept:
            swept.add((row.task, row.network))
            more = sweep_seconds(row, options)
        found.append(seconds(row, known) + more)
    return found

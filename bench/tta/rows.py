"""Makes one row: a lab, its processes, the schedule, and what came of it."""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import results_file
from bench.netlab import Applied, Counters, Lab
from bench.tta import checks
from bench.tta.cpu import Snapshot
from bench.tta.hosts import Processes
from bench.tta.matrix import Row
from bench.tta.methods import METHODS
from bench.tta.networks import NETWORKS, Network, change_to
from bench.tta.records import (
    GO,
    READY,
    TRAINED,
    Pin,
    RankRecord,
    Settings,
    read_records,
    signal,
    write_settings,
)
from gradpilot.protos.messages import Option

READY_SECONDS = 120.0
SECONDS_PER_STEP = 6.0
"""More than a dense step of the largest model takes on the slowest link."""

EVALUATE_SECONDS = 300.0


def lab_name(folder: Path) -> str:
    """Return the name of the labs of a folder of rows; of two folders they can be up at once."""
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=4).hexdigest()
    return f"tta{digest}"


def run(row: Row, folder: Path, pins: Sequence[Pin] = ()) -> dict[str, Any]:
    """Return everything that was measured in one row.

    Args:
        row: What to train.
        folder: Folder of all rows; gives the lab its name.
        pins: Of the oracle.

    Raises:
        RowFailedError: A process failed.
        NetlabError: The lab cannot be made or changed.
    """
    begun = time.monotonic()
    network, method = NETWORKS[row.network].turned(row.seed), METHODS[row.method]
    with (
        tempfile.TemporaryDirectory(prefix="tta-") as name,
        Lab(lab_name(folder), hosts=row.ranks, link=network.links(row.ranks), replace=True) as lab,
        Processes(lab, Path(name)) as processes,
    ):
        at = Path(name)
        address = processes.start_controller(method) if method.policy else ""
        seconds = SECONDS_PER_STEP * row.steps
        settings = Settings(
            task=row.task,
            method=row.method,
            seed=row.seed,
            steps=row.steps,
            controller=address,
            last_seconds=network.last_seconds,
            deadline=READY_SECONDS + seconds + EVALUATE_SECONDS,
            pins=tuple(pins),
        )
        write_settings(at, settings)
        processes.start_ranks(row.ranks)
        processes.wait_for((at / READY).exists, READY_SECONDS, "the ranks to attach")
        before, applied = _begin(lab, network, row.ranks)
        idle = Snapshot.take(processes.pids)
        signal(at, GO)
        processes.wait_for((at / TRAINED).exists, seconds, "the training to end")
        after = lab.counters()
        others = Snapshot.take(processes.pids).others(idle)
        changes = applied()
        processes.wait_for_end(EVALUATE_SECONDS)
        records = read_records(at, row.ranks)
        background = _background(lab, row.ranks)
    late = max((one.done_seconds - one.asked_seconds for one in changes), default=0.0)
    used = [b - a for a, b in zip(before, after, strict=True)]
    return {
        **_row(row),
        **_trained(records, row),
        "wall_seconds": round(time.monotonic() - begun, 2),
        "phases_met": len(network.beginnings(records[0].ends[-1])),
        "others_cpu": round(others, 4),
        "sent_bytes": [one.sent_bytes for one in used],
        "received_bytes": [one.received_bytes for one in used],
        "dropped_packets": sum(one.dropped_packets for one in used),
        "background_bytes": background,
        "late_seconds": round(late, 3),
        "versions": [f"{k} {v}" for k, v in results_file.versions().items()],
    }


def sweep(row: Row, folder: Path, options: Sequence[Option]) -> dict[str, list[float]]:
    """Return the step time of every option in every phase of a network.

    Args:
        row: Task, network, seed and ranks.
        folder: As of ``run``.
        options: What to try.

    Returns:
        By phase (see ``phase_key``), seconds in the order of ``options``.
    """
    network = NETWORKS[row.network]
    busy = any(phase.background_mbit for phase in network.phases)
    found: dict[str, list[float]] = {}
    for phase in network.phases:
        key = phase_key(*phase.state)
        if key in found:
            continue
        links = network.links(row.ranks)
        if network.changing:
            links = [phase.link] * row.ranks
        with (
            tempfile.TemporaryDirectory(prefix="tta-") as name,
            Lab(lab_name(folder), hosts=row.ranks, link=links, replace=True) as lab,
            Processes(lab, Path(name)) as processes,
        ):
            if busy:
                lab.apply(change_to(phase, 0.0, row.ranks, busy))
            deadline = READY_SECONDS + len(options) * 20 * SECONDS_PER_STEP
            settings = Settings(
                row.task, "bf16", row.seed, 0, "", network.last_seconds, deadline,
                sweep=tuple(options),
            )  # fmt: skip
            write_settings(Path(name), settings)
            processes.start_ranks(row.ranks)
            processes.wait_for_end(deadline)
            records = read_records(Path(name), row.ranks)
        found[key] = [max(seconds) for seconds in zip(*(r.sweep for r in records), strict=True)]
    return found


def phase_key(link: Any, background_mbit: float) -> str:
    """Return the name of a phase's state in a sweep."""
    return f"{link.rate_mbit:g} Mbit/s {link.rtt_ms:g} ms, others {background_mbit:g}"


def _begin(lab: Lab, network: Network, hosts: int) -> tuple[list[Counters], Any]:
    """Begin the schedule; return the counters of that moment and what tells the changes made."""
    trace = network.trace(hosts)
    if trace is not None:
        lab.apply(next(trace.groups())[1])  # other traffic takes a moment to start
    before = lab.counters()
    if trace is None:
        return before, lambda: []
    replay = lab.play(trace, loop_seconds=network.period)

    def end() -> list[Applied]:
        replay.stop()
        return replay.applied

    return before, end


def _background(lab: Lab, hosts: int) -> int:
    return sum(lab.carried(i, i + 1) for i in range(0, hosts - 1, 2))


def _row(row: Row) -> dict[str, Any]:
    return {
        "task": row.task,
        "network": row.network,
        "method": row.method,
        "seed": row.seed,
        "ranks": row.ranks,
        "steps": row.steps,
    }


def _trained(records: Sequence[RankRecord], row: Row) -> dict[str, Any]:
    """Return what the ranks saw; times are rank 0's."""
    first = records[0]
    evaluated = sorted((e for r in records for e in r.evaluations), key=lambda one: one.step)
    equal, sampled = checks.in_sync(records)
    kept, judged = checks.conserved(records)
    plans = len({tuple((p.step, p.labels) for p in r.plans) for r in records}) == 1
    return {
        "attach_seconds": round(max(r.attach_seconds for r in records), 3),
        "seconds": round(first.ends[-1], 4),
        "ends": [round(end, 4) for end in first.ends],
        "losses": [_finite(loss) for loss in first.losses],
        "evaluated_steps": [one.step for one in evaluated],
        "values": [_finite(one.value) for one in evaluated],
        "plan_steps": [one.step for one in first.plans],
        "plan_seconds": [round(one.seconds, 3) for one in first.plans],
        "plans": [" + ".join(one.labels) for one in first.plans],
        "in_sync": plans and 0 < equal == sampled,
        "sync_checks": [equal, sampled],
        "conserved": kept == judged,
        "conserved_checks": [kept, judged],
        "switches": first.switches,
        "nonfinite": first.nonfinite,
        "frozen": first.frozen,
        "decisions": [asdict(decided) for decided in first.decisions],
    }


def _finite(value: float) -> float | None:
    """Return a value that JSON can hold; None for one that is not finite."""
    return round(value, 6) if math.isfinite(value) else None

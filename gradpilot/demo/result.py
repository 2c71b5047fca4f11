"""From the records of the ranks to one result: phases, decisions, claims that hold or do not."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradpilot.demo.carriers import ALL_GATHER, ALL_REDUCE, carrier, favoured, wire_seconds
from gradpilot.demo.records import RankRecord, Settings
from gradpilot.demo.schedule import Phase
from gradpilot.protos.jsoncodec import from_json
from gradpilot.protos.messages import BF16, Candidate, Decision, LinkEstimate

SCHEMA = 1
"""Version of the JSON object."""

LEAST_SWITCHES = 3
MOST_POINTS_LOST = 1.0
MOST_LINK_ERROR = 0.15
"""Targets of the claims."""

LINK_BOUND_SECONDS = 0.1
"""Where bf16 spends less than this on the emulated link in a step, the loopback transfer that comes
on top is a large part of what the controller measures, so its estimate is not held against the
emulated numbers."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Everything that was recorded.

    Attributes:
        settings: What was asked for.
        adaptive: Records of the adaptive run in rank order.
        baseline: The same of the bf16 run.
        decisions: All decisions with the compute seconds of each, oldest first.
    """

    settings: Settings
    adaptive: tuple[RankRecord, ...]
    baseline: tuple[RankRecord, ...]
    decisions: tuple[tuple[Decision, float], ...]

    @staticmethod
    def of(
        settings: Settings, adaptive: Sequence[RankRecord], baseline: Sequence[RankRecord]
    ) -> Runs:
        """Return the runs with their decisions decoded."""
        taken = tuple(
            (from_json(Decision, t.decision), t.compute_seconds) for t in adaptive[0].decisions
        )
        return Runs(settings, tuple(adaptive), tuple(baseline), taken)

    @property
    def switches(self) -> int:
        """Return how often the options in force changed; a plan that confirms them is none."""
        plans = [switch.options for switch in self.adaptive[0].switches]
        return sum(a != b for a, b in itertools.pairwise(plans))

    @property
    def compared(self) -> tuple[int, int]:
        """Return how many sampled steps had equal parameters on all ranks, and of how many."""
        equal = total = 0
        for records in (self.adaptive, self.baseline):
            for sums in zip(*(r.checksums for r in records), strict=True):
                total += 1
                equal += len(set(sums)) == 1
        return equal, total

    @property
    def in_sync(self) -> bool:
        """Return whether all ranks had equal parameters and plans whenever that was looked at."""
        equal, total = self.compared
        one_plan = all(
            len({r.switches for r in records}) == 1 for records in (self.adaptive, self.baseline)
        )
        return 0 < equal == total and one_plan


def build(runs: Runs, elapsed_seconds: float) -> dict[str, Any]:
    """Return the result as ``gradpilot demo --output json`` prints it; every number was measured.

    Seconds are rank 0's sum over steps; starting, evaluation and checksums are outside of them, in
    both runs.

    Args:
        runs: What was recorded.
        elapsed_seconds: What everything took on the clock, starting included.
    """
    adaptive, baseline = runs.adaptive[0], runs.baseline[0]
    return {
        "schema": SCHEMA,
        "world_size": adaptive.world_size,
        "steps": len(adaptive.step_seconds),
        "dataset": runs.settings.dataset,
        "seed": runs.settings.seed,
        "link": "emulated" if adaptive.emulated and baseline.emulated else "real",
        "phases": [_phase(runs, phase, end) for phase, end in runs.settings.schedule.spans()],
        "decisions": [_decision(runs, d) for d, _ in runs.decisions if d.outcome == "switch"],
        "decisions_taken": len(runs.decisions),
        "switches": runs.switches,
        "in_sync": runs.in_sync,
        "final_accuracy": adaptive.accuracy[-1].accuracy,
        "baseline_accuracy": baseline.accuracy[-1].accuracy,
        "seconds": adaptive.seconds,
        "baseline_seconds": baseline.seconds,
        "elapsed_seconds": elapsed_seconds,
        "claims": _claims(runs),
    }


# --- parts -------------------------------------------------------------------------------------


def _phase(runs: Runs, phase: Phase, end: int) -> dict[str, Any]:
    first = phase.first_step
    own, other = (r[0].step_seconds[first:end] for r in (runs.adaptive, runs.baseline))
    within = [s for s in runs.adaptive[0].switches if s.step < end]
    changes = [s.step - first for s in within if s.step > first]
    link = last_link(runs, phase, end)
    return {
        "name": phase.name,
        "first_step": first,
        "last_step": end - 1,
        "latency_seconds": phase.latency_seconds,
        "bits_per_second": phase.bits_per_second,
        "estimate": _link(link) if link is not None else None,
        "options": list(within[-1].options),
        "steps_to_first_switch": changes[0] if changes else None,
        "seconds": sum(own),
        "baseline_seconds": sum(other),
        # Of the second half, when the plan has settled.
        "step_seconds": statistics.median(own[len(own) // 2 :]),
        "baseline_step_seconds": statistics.median(other[len(other) // 2 :]),
    }


def _decision(runs: Runs, decision: Decision) -> dict[str, Any]:
    assert decision.plan is not None
    in_force = [s.step for s in runs.adaptive[0].switches if s.plan_id == decision.id]
    return {
        "step": decision.step,
        "plan_id": decision.id,
        "in_force_from": in_force[0] if in_force else None,
        "phase": runs.settings.schedule.at(decision.step).name,
        "options": [option.label for option in decision.plan.options()],
        "reason": decision.reason,
        "link": _link(decision.link) if decision.link is not None else None,
        "chosen": _candidate(decision.chosen) if decision.chosen is not None else None,
        "front": [_candidate(candidate) for candidate in decision.front],
    }


def _link(link: LinkEstimate) -> dict[str, Any]:
    beta = link.beta_seconds_per_byte
    return {
        "latency_seconds": link.alpha_seconds,
        "bits_per_second": 8.0 / beta if beta > 0 else None,
        "separable": link.separable,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "options": [option.label for option in candidate.options],
        "statistical_loss": candidate.statistical_loss,
        "compression_seconds": candidate.compression_seconds,
        "synchronisation_seconds": candidate.synchronisation_seconds,
        "gain": candidate.gain,
        "efficiency": candidate.efficiency,
        "step_seconds": candidate.step_seconds,
        "wire_ratio": candidate.wire_ratio,
    }


def last_link(runs: Runs, phase: Phase, end: int) -> LinkEstimate | None:
    """Return the estimate of the last decision taken in a phase; None if there was none."""
    found = [d.link for d, _ in runs.decisions if phase.first_step <= d.step < end and d.link]
    return found[-1] if found else None


# --- claims ------------------------------------------------------------------------------------


def _claims(runs: Runs) -> list[dict[str, Any]]:
    adaptive, baseline = runs.adaptive[0], runs.baseline[0]
    equal, total = runs.compared
    points = 100 * (adaptive.accuracy[-1].accuracy - baseline.accuracy[-1].accuracy)
    ratio = adaptive.seconds / baseline.seconds
    gathers, reduces = (_well_carried(runs, kind) for kind in (ALL_GATHER, ALL_REDUCE))
    return [
        _claim(
            "all ranks in sync: equal parameters at sampled steps, equal plans",
            f"{total} of {total}",
            f"{equal} of {total}",
            runs.in_sync,
        ),
        _claim(
            "plan switches that changed options",
            f">= {LEAST_SWITCHES}",
            runs.switches,
            runs.switches >= LEAST_SWITCHES,
        ),
        _claim(
            "decisions for all-gather where the cost model favours it on the emulated link",
            ">= 1",
            gathers,
            gathers >= 1,
        ),
        _claim(
            "decisions for all-reduce where the cost model favours it on the emulated link",
            ">= 1",
            reduces,
            reduces >= 1,
        ),
        _claim(
            "final accuracy less that of static bf16, points",
            f">= -{MOST_POINTS_LOST:g}",
            round(points, 3),
            points >= -MOST_POINTS_LOST,
        ),
        _claim(
            "training time over that of static bf16, same steps and phases",
            "< 1",
            round(ratio, 3),
            ratio < 1,
        ),
        *_link_claims(runs),
    ]


def _claim(name: str, target: str, measured: float | str, holds: bool) -> dict[str, Any]:
    return {"name": name, "target": target, "measured": measured, "holds": holds}


def _well_carried(runs: Runs, kind: str) -> int:
    """Return how many switches went to this carrier where it is the cheaper one."""
    record, count = runs.adaptive[0], 0
    for decision, compute in runs.decisions:
        if decision.outcome != "switch" or decision.plan is None:
            continue
        phase = runs.settings.schedule.at(decision.step)
        best = favoured(decision, compute, record.elements, phase, record.world_size)
        count += carrier(decision.plan.options()) == kind == best
    return count


def _link_claims(runs: Runs) -> list[dict[str, Any]]:
    """Hold the estimate of what dominates against the emulated link, in each slow phase."""
    claims, record = [], runs.adaptive[0]
    for phase, end in runs.settings.schedule.spans():
        whole = wire_seconds(BF16, record.elements, phase, record.world_size)
        if whole < LINK_BOUND_SECONDS:
            continue
        bytes_only = Phase(phase.name, phase.first_step, 0.0, phase.bits_per_second)
        pushing = wire_seconds(BF16, record.elements, bytes_only, record.world_size)
        what = "bandwidth" if pushing > whole / 2 else "latency"
        link, error = last_link(runs, phase, end), math.inf
        if link is not None and what == "latency":
            error = link.alpha_seconds / phase.latency_seconds - 1
        elif link is not None:
            error = link.beta_seconds_per_byte / phase.beta - 1
        claims.append(
            _claim(
                f"estimated {what} against the emulated one, phase {phase.name}",
                f"within {100 * MOST_LINK_ERROR:g} %",
                f"{100 * error:+.1f} %" if math.isfinite(error) else "no estimate",
                abs(error) <= MOST_LINK_ERROR,
            )
        )
    return claims

"""Records of a demo as the ranks would leave them, with known numbers."""

from __future__ import annotations

from dataclasses import replace

from gradpilot.demo.records import Accuracy, Checksum, RankRecord, Settings, Switch, Taken
from gradpilot.demo.result import Runs
from gradpilot.demo.schedule import Phase, Schedule
from gradpilot.protos.jsoncodec import to_json
from gradpilot.protos.messages import (
    BF16,
    Assignment,
    Candidate,
    Decision,
    LinkEstimate,
    Option,
    Plan,
)

TOPK = Option("topk", 0.01, "allgather")
ELEMENTS = (100_000, 200_000, 250_000, 30_000)
FAST = Phase("fast", 0, 0.1e-3, 10e9)
SLOW = Phase("slow", 40, 1e-3, 50e6)
SCHEDULE = Schedule((FAST, SLOW, Phase("fast", 80, 0.1e-3, 10e9)), 120)
WORLD_SIZE = 4


def candidate(option: Option, wire: float, efficiency: float, step: float = 0.05) -> Candidate:
    return Candidate(
        options=(option,),
        statistical_loss=1 - efficiency,
        compression_seconds=0.004,
        synchronisation_seconds=wire,
        gain=efficiency,
        efficiency=efficiency,
        step_seconds=step,
        wire_ratio=0.5,
    )


def decision(
    number: int, step: int, option: Option, phase: Phase, outcome: str = "switch"
) -> Decision:
    """A decision with two candidates on its front and a perfect link estimate."""
    front = (candidate(BF16, 0.3, 1.0), candidate(TOPK, 0.03, 0.85))
    chosen = front[0] if option == BF16 else front[1]
    assignments = tuple(Assignment(f"bucket{i}", option) for i in range(len(ELEMENTS)))
    plan = Plan(1, number, "layout", assignments, policy="adaptive", reason="planted")
    return Decision(
        run="demo",
        model="model",
        term=1,
        id=number,
        step=step,
        created=0.0,
        policy="adaptive",
        outcome=outcome,
        reason=f"{outcome} to {option.label} <planted & plain>",
        link=LinkEstimate(phase.latency_seconds, phase.beta),
        current=front[0],
        chosen=chosen,
        front=front,
        plan=plan if outcome == "switch" else None,
    )


def record(kind: str, rank: int) -> RankRecord:
    adaptive = kind == "adaptive"
    slow = 0.08 if adaptive else 0.4
    switches = [Switch(0, 0, (BF16.label,))]
    decisions: tuple[Taken, ...] = ()
    if adaptive:
        switches += [
            Switch(10, 1, (BF16.label,)),
            Switch(45, 3, (TOPK.label,)),
            Switch(85, 4, (BF16.label,)),
        ]
        taken = (
            decision(1, 8, BF16, FAST),
            decision(2, 20, BF16, FAST, "keep"),
            decision(3, 42, TOPK, SLOW),
            decision(4, 82, BF16, FAST),
        )
        decisions = tuple(Taken(to_json(d), 0.02) for d in taken) if rank == 0 else ()
    steps = tuple(0.04 if not 45 <= i < 80 else slow for i in range(SCHEDULE.steps))
    curve = (Accuracy(19, 1.0, 0.5), Accuracy(59, 4.0, 0.9), Accuracy(119, sum(steps), 0.97))
    return RankRecord(
        kind=kind,
        rank=rank,
        world_size=WORLD_SIZE,
        step_seconds=steps,
        switches=tuple(switches),
        checksums=tuple(Checksum(step, f"{step:016x}") for step in range(19, 120, 20)),
        accuracy=curve if rank == 0 else (),
        elements=ELEMENTS,
        emulated=True,
        agreed=len(switches) - 1,
        nonfinite=0,
        decisions=decisions,
    )


def runs() -> Runs:
    adaptive, baseline = (
        tuple(record(kind, rank) for rank in range(WORLD_SIZE)) for kind in ("adaptive", "bf16")
    )
    return Runs.of(Settings("digits", 0, SCHEDULE), adaptive, baseline)


def out_of_sync() -> Runs:
    """One rank has other parameters at the last step of the adaptive run."""
    good = runs()
    odd = good.adaptive[2]
    wrong = replace(odd, checksums=(*odd.checksums[:-1], Checksum(119, "f" * 16)))
    return replace(good, adaptive=(*good.adaptive[:2], wrong, good.adaptive[3]))

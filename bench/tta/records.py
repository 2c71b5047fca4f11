"""What the runner tells the ranks, and what a rank tells the runner: plain values, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import Option

SETTINGS = "settings.json"
READY, GO, TRAINED = "ready", "go", "trained"
"""Files by which rank 0 and the runner wait for each other."""


@dataclass(frozen=True, slots=True)
class Pin:
    """An order of the oracle: from a moment of the training on, this option."""

    seconds: float
    option: Option


@dataclass(frozen=True, slots=True)
class Settings:
    """What all ranks must know.

    Attributes:
        task: One of ``TASKS``.
        method: One of ``METHODS``.
        seed: Seed of everything random.
        steps: Steps of the training.
        controller: ``host:port``, empty without.
        last_seconds: How much longer the last rank computes in a step.
        deadline: Seconds after which a rank ends itself.
        pins: Of the oracle, by time.
        sweep: Options whose step time is wanted instead of a training.
    """

    task: str
    method: str
    seed: int
    steps: int
    controller: str
    last_seconds: float
    deadline: float
    pins: tuple[Pin, ...] = ()
    sweep: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """What a rank saw at a sampled step.

    Attributes:
        step: The step.
        digest: Of all parameters after it.
        sent: What this rank sent, ``gradient + residual before - residual after``, times a random
            vector that is the same on all ranks.
        size: Norm of what it sent.
        mean: What the optimizer got, times the same vector.
        tolerance: By how much of ``size`` the mean over ranks of ``sent`` may differ from ``mean``;
            negative if the plan drops parts by design, so that they do differ.
    """

    step: int
    digest: str
    sent: float
    size: float
    mean: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class InForce:
    """Options that came into force, and when."""

    step: int
    seconds: float
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metric after a step; NaN if it is not finite."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision of the controller, for whoever looks for the cause of a figure.

    Attributes:
        step: Newest step reported when it was taken.
        outcome: As of ``messages.Decision``.
        reason: As of ``messages.Decision``.
        predicted_seconds: Step time of what was chosen; 0 if nothing was.
        link_mbit: Bandwidth of the link estimate, Mbit/s of payload; 0 if there was none.
        link_ms: Its one-way latency.
        slowest_rank: Rank that the others wait for most; -1 if unknown.
        slowest_seconds: How much later than the first one it is.
    """

    step: int
    outcome: str
    reason: str
    predicted_seconds: float
    link_mbit: float
    link_ms: float
    slowest_rank: int
    slowest_seconds: float


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A training as one rank saw it.

    Attributes:
        rank: The rank.
        attach_seconds: From a wrapped model to one under control; before the clock begins.
        ends: When every step ended, seconds since all ranks began.
        losses: Training loss of every step.
        evaluations: Those that this rank made; they are shared out.
        plans: Options in force.
        checks: At sampled steps and after the last one.
        switches: Agreed switches.
        nonfinite: Steps with a gradient that was not finite.
        frozen: Why plans could no longer change; empty if they could.
        decisions: On rank 0 with a controller.
        sweep: Median step seconds of every option of ``Settings.sweep``.
    """

    rank: int
    attach_seconds: float
    ends: tuple[float, ...]
    losses: tuple[float, ...]
    evaluations: tuple[Evaluation, ...]
    plans: tuple[InForce, ...]
    checks: tuple[Check, ...]
    switches: int = 0
    nonfinite: int = 0
    frozen: str = ""
    decisions: tuple[Decided, ...] = ()
    sweep: tuple[float, ...] = ()


def write_settings(folder: Path, settings: Settings) -> None:
    """Leave the settings where every rank finds them."""
    (folder / SETTINGS).write_text(to_json(settings), encoding="utf-8")


def read_settings(folder: Path) -> Settings:
    """Return what ``write_settings`` left."""
    return from_json(Settings, (folder / SETTINGS).read_text(encoding="utf-8"))


def write_record(folder: Path, record: RankRecord) -> None:
    """Leave a rank's record for the runner."""
    (folder / f"rank{record.rank}.json").write_text(to_json(record), encoding="utf-8")


def read_records(folder: Path, ranks: int) -> list[RankRecord]:
    """Return the records in rank order.

    Raises:
        OSError: A rank left none.
    """
    return [
        from_json(RankRecord, (folder / f"rank{rank}.json").read_text(encoding="utf-8"))
        for rank in range(ranks)
    ]


def signal(folder: Path, name: str, **values: float) -> None:
    """Leave a file that the other side waits for; it is complete as soon as it is there."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(values), encoding="utf-8")
    part.rename(folder / name)

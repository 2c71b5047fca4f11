"""What the ranks write down and the command reads: plain values, as JSON in the demo's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradpilot.demo.schedule import Schedule
from gradpilot.protos.jsoncodec import from_json, to_json

KINDS = ("adaptive", "bf16")
"""The two runs of one demo, in order."""

SETTINGS_FILE = "settings.json"
EVENTS_FILE = "events.jsonl"


@dataclass(frozen=True, slots=True)
class Settings:
    """What all ranks must know.

    Attributes:
        dataset: One of ``data.DATASETS``.
        seed: Seed of parameters, batches and compressors.
        schedule: Link by step.
    """

    dataset: str
    seed: int
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Switch:
    """A plan that came into force.

    Attributes:
        step: First step under it.
        plan_id: Its id; 0 for the option that the run began with.
        options: Labels of its options.
    """

    step: int
    plan_id: int
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checksum:
    """Digest of all parameters of one rank after a step."""

    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Test accuracy after a step, with the training seconds until then."""

    step: int
    seconds: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Taken:
    """A decision of the controller as the report needs it.

    Attributes:
        decision: JSON text of ``messages.Decision`` without its inputs.
        compute_seconds: Compute time of a step that it was taken with.
    """

    decision: str
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One run as one rank saw it.

    Attributes:
        kind: One of ``KINDS``.
        rank: The rank.
        world_size: Ranks N.
        step_seconds: Duration of every step, from fetching the batch to the optimizer's end;
            evaluation and checksums are outside.
        switches: Plans in force, the first from step 0.
        checksums: At sampled steps and after the last one.
        accuracy: On rank 0 only.
        elements: Elements of every bucket, in order.
        emulated: Whether the link was emulated.
        agreed: Switches that the agent counted.
        nonfinite: Steps with a non-finite gradient.
        decisions: On rank 0 of the adaptive run only.
    """

    kind: str
    rank: int
    world_size: int
    step_seconds: tuple[float, ...]
    switches: tuple[Switch, ...]
    checksums: tuple[Checksum, ...]
    accuracy: tuple[Accuracy, ...]
    elements: tuple[int, ...]
    emulated: bool
    agreed: int
    nonfinite: int
    decisions: tuple[Taken, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the time of all steps together."""
        return sum(self.step_seconds)


def write_settings(folder: Path, settings: Settings) -> None:
    """Leave the settings where every rank finds them."""
    (folder / SETTINGS_FILE).write_text(to_json(settings), encoding="utf-8")


def read_settings(folder: Path) -> Settings:
    """Return what ``write_settings`` left."""
    return from_json(Settings, (folder / SETTINGS_FILE).read_text(encoding="utf-8"))


def write_record(folder: Path, record: RankRecord) -> None:
    """Leave a rank's record for the command."""
    _record_path(folder, record.kind, record.rank).write_text(to_json(record), encoding="utf-8")


def read_records(folder: Path, kind: str, world_size: int) -> tuple[RankRecord, ...]:
    """Return the records of a run in rank order.

    Raises:
        OSError: A rank left none.
    """
    return tuple(
        from_json(RankRecord, _record_path(folder, kind, rank).read_text(encoding="utf-8"))
        for rank in range(world_size)
    )


def note_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Leave what ended a rank."""
    text = f"rank {rank}: {type(error).__name__}: {error}"
    (folder / f"failure-{rank}.txt").write_text(text, encoding="utf-8")


def first_failure(folder: Path) -> str:
    """Return what ended the first rank that failed; the others mostly failed for want of it."""
    notes = sorted(folder.glob("failure-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    return notes[0].read_text(encoding="utf-8", errors="replace") if notes else ""


class Events:
    """What rank 0 tells while it runs, one JSON object a line."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / EVENTS_FILE).open("a", encoding="utf-8", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        """Write one event."""
        self._file.write(json.dumps({"event": event, **fields}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _record_path(folder: Path, kind: str, rank: int) -> Path:
    return folder / f"{kind}-{rank}.json"

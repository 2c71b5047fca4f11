"""Who holds a job up, and why: read from the dumps that the watchdogs of all ranks left.

Ranks hand the same buckets over in the same order, so a rank is odd if at one place of that order
it has something else than most, if it has not come as far as others, if it has ended or is stopped,
or if it left no dump at all. Reasons are weighed in the order of ``KINDS``: what comes first
explains what comes after, as a rank that others wait for in another collective is behind, too.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradpilot.errors import GradpilotError
from gradpilot.worker_agent.dump import ENDED, Dump, read
from gradpilot.worker_agent.flight_recorder import Note

KINDS = ("differs", "ended", "stopped", "missing", "behind")
"""Kinds of finding, the weightiest first."""

FRAMES = 6
"""Innermost Python frames of an odd rank's main thread that are shown."""

AT_ONCE_SECONDS = 0.05
"""Ranks that end within this time ended together."""

Place = tuple[int, int]
"""Step and bucket."""

Work = tuple[str, str, int, int, int]
"""What all ranks must have alike: fingerprint, option, bytes, term and plan."""


class DiagnoseError(GradpilotError):
    """There is nothing to diagnose."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something odd about one rank.

    Attributes:
        rank: The rank.
        kind: One of ``KINDS``.
        why: For people.
    """

    rank: int
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the dumps of one model in one start of a job say.

    Attributes:
        run: Run id.
        incarnation: Id of the start.
        model: Name of the model.
        world_size: Number of ranks.
        dumps: The dumps, by rank.
        odd: Ranks that hold the others up; empty if none stands out.
        verdict: One sentence.
        findings: All that is odd, the weightiest kind first.
    """

    run: str
    incarnation: str
    model: str
    world_size: int
    dumps: tuple[Dump, ...]
    odd: tuple[int, ...]
    verdict: str
    findings: tuple[Finding, ...]


def load(folder: Path) -> tuple[list[Dump], list[str]]:
    """Return all dumps in a folder and below, and what could not be read, in words.

    Raises:
        DiagnoseError: There is no dump.
    """
    if not folder.is_dir():
        raise DiagnoseError(f"expected a folder with dumps, {str(folder)!r} is none")
    dumps, bad = [], []
    for path in sorted(folder.rglob("*.json")):
        try:
            dumps.append(read(path))
        except (OSError, ValueError) as error:
            bad.append(f"{path}: {error}")
    if not dumps:
        said = "".join(f"\n  {line}" for line in bad)
        raise DiagnoseError(
            f"no dumps in {folder}: the watchdog writes them there when a job gets stuck"
            f" (GRADPILOT_WATCHDOG_SECONDS, GRADPILOT_DUMPS){said}"
        )
    return dumps, bad


def newest(dumps: Iterable[Dump]) -> list[list[Dump]]:
    """Return the dumps of the newest start of every run and model, by rank."""
    groups: dict[tuple[str, str], dict[str, dict[int, Dump]]] = {}
    for dump in dumps:
        starts = groups.setdefault((dump.run, dump.model), {})
        ranks = starts.setdefault(dump.incarnation, {})
        if dump.rank not in ranks or ranks[dump.rank].at < dump.at:
            ranks[dump.rank] = dump
    return [
        [dump for _, dump in sorted(starts[max(starts)].items())]
        for _, starts in sorted(groups.items())
    ]


def diagnose(dumps: Sequence[Dump]) -> Diagnosis:
    """Return what is odd about one start.

    Args:
        dumps: One for each rank that left one, of one model and start; at least one.

    Raises:
        DiagnoseError: They cannot be of one start.
    """
    sizes = {dump.world_size for dump in dumps}
    if len(sizes) != 1:
        raise DiagnoseError(f"dumps of run {dumps[0].run!r} tell of {sorted(sizes)} ranks")
    size = sizes.pop()
    found = [*_differing(dumps), *_ended(dumps), *_stopped(dumps)]
    present = {dump.rank for dump in dumps}
    found += [
        Finding(
            rank,
            "missing",
            "left no dump: it closed in good order, its machine is gone, or its dumps lie on"
            " another machine (let GRADPILOT_DUMPS name a folder that all machines share)",
        )
        for rank in range(size)
        if rank not in present
    ]
    found += _behind(dumps)
    found.sort(key=lambda finding: KINDS.index(finding.kind))
    odd = tuple(f.rank for f in found if f.kind == found[0].kind)
    return Diagnosis(
        run=dumps[0].run,
        incarnation=dumps[0].incarnation,
        model=dumps[0].model,
        world_size=size,
        dumps=tuple(dumps),
        odd=odd,
        verdict=_verdict(dumps, found, odd),
        findings=tuple(found),
    )


def _differing(dumps: Sequence[Dump]) -> list[Finding]:
    """Return who has something else than most at the first place where not all have the same."""
    by_place: dict[Place, dict[int, Note]] = collections.defaultdict(dict)
    for dump in dumps:
        for note in dump.notes:
            by_place[note.step, note.bucket][dump.rank] = note
    for place in sorted(by_place):
        notes = by_place[place]
        # A rank that had nothing to note in a dense step did not look at the bucket's identity.
        identified = all(note.fingerprint for note in notes.values())
        work = {rank: _work(note, identified) for rank, note in notes.items()}
        kinds = collections.Counter(work.values())
        if len(kinds) == 1:
            continue
        (common, most), *others = kinds.most_common()
        if most > others[0][1]:
            odd = [rank for rank in work if work[rank] != common]
            against = f"most ranks have {_in_words(common)}"
        else:
            odd = list(work)
            against = "and no majority has the same"
        return [
            Finding(
                rank,
                "differs",
                f"in step {place[0]}, bucket {place[1]}, it has {_in_words(work[rank])}; {against}",
            )
            for rank in odd
        ]
    return []


def _ended(dumps: Sequence[Dump]) -> list[Finding]:
    """Return who ended: the first, if all did, as a launcher ends the others when one is gone."""
    ended = [dump for dump in dumps if dump.reason == ENDED]
    if len(ended) == len(dumps):
        first = min(dump.at for dump in ended)
        ended = [dump for dump in ended if dump.at - first < AT_ONCE_SECONDS]
        if len(ended) == dumps[0].world_size:
            return []  # all at once: from outside
    return [
        Finding(dump.rank, "ended", f"its process (pid {dump.pid} on {dump.node}) has ended")
        for dump in ended
    ]


def _stopped(dumps: Sequence[Dump]) -> list[Finding]:
    return [
        Finding(
            dump.rank,
            "stopped",
            f"its process (pid {dump.pid} on {dump.node}) is stopped by a signal or a debugger;"
            f" kill -CONT {dump.pid} lets it go on",
        )
        for dump in dumps
        if dump.threads and dump.threads[0].state in ("T", "t")
    ]


def _behind(dumps: Sequence[Dump]) -> list[Finding]:
    furthest = max(_reached(dump) for dump in dumps)
    return [
        Finding(
            dump.rank,
            "behind",
            f"{_position(dump)}, while the others came to step {furthest[0]}, bucket {furthest[1]}",
        )
        for dump in dumps
        if _reached(dump) < furthest
    ]


def _verdict(dumps: Sequence[Dump], found: Sequence[Finding], odd: tuple[int, ...]) -> str:
    if found:
        ranks = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
        return f"odd: {ranks}: {found[0].kind}: {found[0].why}"
    step, bucket = _reached(dumps[0])
    if all(dump.steps > step for dump in dumps):
        return (
            f"no rank stands out: all have ended step {step} and none has begun the next; they are"
            " outside backward (data, evaluation, checkpoint), or ended together"
        )
    return (
        f"no rank stands out: all handed over bucket {bucket} of step {step} alike and wait for its"
        " collective: look at the network between them"
    )


def _reached(dump: Dump) -> Place:
    """Return the place of the newest bucket that was handed over."""
    if not dump.notes:
        return (-1, -1)
    return (dump.notes[-1].step, dump.notes[-1].bucket)


def _position(dump: Dump) -> str:
    step, bucket = _reached(dump)
    if step < 0:
        return "it has not handed over any bucket"
    if dump.steps > step:
        return f"it ended step {step} and has not begun the next"
    return f"it came to step {step}, bucket {bucket}"


def _work(note: Note, identified: bool) -> Work:
    return (note.fingerprint if identified else "", note.op, note.bytes, note.term, note.plan)


def _in_words(work: Work) -> str:
    fingerprint, op, size, term, plan = work
    which = f" {fingerprint}" if fingerprint else ""
    return f"{op!r} under plan {term}.{plan} for a bucket{which} of {size:,} bytes"


# --- for people and programs ---------------------------------------------------------------------


def lines(diagnosis: Diagnosis) -> list[str]:
    """Return a diagnosis as lines of text."""
    d = diagnosis
    text = [
        f"run {d.run}, model {d.model}, start {d.incarnation}:"
        f" {len(d.dumps)} dumps of {d.world_size} ranks",
        d.verdict,
    ]
    text += [f"  rank {f.rank} {f.kind}: {f.why}" for f in d.findings[1:]]
    row = "{:>5} {:12} {:8} {:>9} {:>7} {:>7} {:>9} {:>12}  {}"
    text.append(
        row.format("RANK", "NODE", "REASON", "IDLE", "STEP", "BUCKET", "PLAN", "BYTES", "OP")
    )
    for dump in d.dumps:
        cells: tuple[Any, ...] = ("-", "-", "-", "-", "")
        if dump.notes:
            note = dump.notes[-1]
            cells = (note.step, note.bucket, f"{note.term}.{note.plan}", f"{note.bytes:,}", note.op)
        idle = f"{dump.idle_seconds:.1f} s"
        text.append(row.format(dump.rank, dump.node[:12], dump.reason, idle, *cells))
    for dump in d.dumps:
        if dump.rank in d.odd and dump.threads:
            text += _thread_lines(dump)
    return text


def _thread_lines(dump: Dump) -> list[str]:
    main = dump.threads[0]
    where = f" in {main.waits_in}" if main.waits_in else ""
    text = [f"rank {dump.rank}, main thread, state {main.state or '?'}{where}"]
    if not main.stack:
        return [*text, "  no Python frames: it did not answer"]
    frames = [line for line in main.stack.splitlines() if line.startswith("  ")]
    more = [f"  ... {len(frames) - FRAMES} more in its dump"] if len(frames) > FRAMES else []
    return [*text, *frames[:FRAMES], *more]


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis as an object for ``json.dumps``: with the last place of each rank."""
    values = asdict(diagnosis)
    values["dumps"] = [
        {
            **{name: value for name, value in asdict(dump).items() if name != "notes"},
            "last": asdict(dump.notes[-1]) if dump.notes else None,
        }
        for dump in diagnosis.dumps
    ]
    return values


def report(folder: Path) -> tuple[list[Diagnosis], list[str]]:
    """Return the diagnosis of every run and model in a folder, and what could not be read.

    Raises:
        DiagnoseError: There is no dump, or dumps contradict each other.
    """
    dumps, bad = load(folder)
    return [diagnose(group) for group in newest(dumps)], bad


def show(diagnoses: Sequence[Diagnosis], bad: Sequence[str], output: str) -> None:
    """Print diagnoses on stdout, as ``text`` or ``json``; in text, bad files on stderr."""
    import json

    if output == "json":
        result: Mapping[str, Any] = {
            "diagnoses": [as_json(d) for d in diagnoses],
            "unreadable": list(bad),
        }
        sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
        return
    sys.stdout.write("\n\n".join("\n".join(lines(d)) for d in diagnoses) + "\n")
    for line in bad:
        sys.stderr.write(f"gradpilot: not read: {line}\n")

"""Dumps as watchdogs leave them, and whom the diagnosis names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradpilot.cli import main
from gradpilot.diagnose import KINDS, DiagnoseError, Diagnosis, as_json, diagnose, lines, newest
from gradpilot.worker_agent.dump import ENDED, STALLED, Dump, Thread, write
from gradpilot.worker_agent.flight_recorder import Note

RANKS = 4
STACK = 'Stack (most recent call first):\n  File "data.py", line 7 in read\n' + "".join(
    f'  File "f{i}.py", line {i} in f\n' for i in range(8)
)


def note(step: int, bucket: int, **changes: object) -> Note:
    number = 3 * step + bucket + 1
    it = Note(number, step, bucket, f"bucket{bucket}", "topk 1% allgather", 4096, 1, 5, 0.0, 1)
    return replace(it, **changes)  # type: ignore[arg-type]


def dump(rank: int, last: tuple[int, int] = (9, 2), **changes: object) -> Dump:
    """Return the dump of a rank that came to a step and bucket, of three each."""
    step, _ = last
    places = [(s, b) for s in range(step - 3, step + 1) for b in range(3) if (s, b) <= last]
    it = Dump(
        run="r",
        incarnation="001",
        model="model",
        rank=rank,
        world_size=RANKS,
        node=f"n{rank}",
        pid=100 + rank,
        reason=STALLED,
        at=1e9,
        idle_seconds=300.0,
        steps=step,
        notes=tuple(note(s, b) for s, b in places),
        threads=(Thread(100 + rank, "main", "S", "futex_wait_queue", STACK),),
    )
    return replace(it, **changes)  # type: ignore[arg-type]


def all_but(odd: Dump | None, rank: int = 1) -> Diagnosis:
    dumps = [dump(r) for r in range(RANKS) if r != rank]
    return diagnose(sorted([*dumps, *([odd] if odd else [])], key=lambda d: d.rank))


def changed(rank: int, step: int, bucket: int, **changes: object) -> Dump:
    """Return a dump with other work at one place."""
    it = dump(rank)
    notes = tuple(
        replace(n, **changes) if (n.step, n.bucket) == (step, bucket) else n  # type: ignore[arg-type]
        for n in it.notes
    )
    return replace(it, notes=notes)


@pytest.mark.parametrize(
    ("odd", "kind", "says"),
    [
        (dump(1, (9, 0)), "behind", "came to step 9, bucket 0, while the others came to step 9"),
        (dump(1, (8, 2), steps=9), "behind", "ended step 8 and has not begun the next"),
        (dump(1, steps=-1, notes=()), "behind", "not handed over any bucket"),
        (changed(1, 9, 1, op="bf16 native"), "differs", "'bf16 native' under plan 1.5"),
        (changed(1, 8, 1, plan=6), "differs", "in step 8, bucket 1, it has .* under plan 1.6"),
        (changed(1, 9, 0, bytes=8), "differs", "of 8 bytes; most ranks have"),
        (changed(1, 9, 0, fingerprint="other"), "differs", "a bucket other of"),
        (dump(1, reason=ENDED, threads=()), "ended", "pid 101 on n1"),
        (dump(1, threads=(Thread(101, "main", "T"),)), "stopped", "kill -CONT 101"),
        (None, "missing", "left no dump"),
    ],
)
def test_the_odd_rank_is_named_with_the_reason(odd: Dump | None, kind: str, says: str) -> None:
    found = all_but(odd)
    assert found.odd == (1,)
    assert found.findings[0].kind == kind
    assert found.verdict.startswith(f"odd: rank 1: {kind}: ")
    assert re.search(says, found.verdict), found.verdict


def test_a_stopped_rank_is_also_behind_but_that_is_not_the_reason() -> None:
    found = all_but(dump(1, (9, 0), threads=(Thread(101, "main", "T"),)))
    assert [f.kind for f in found.findings] == ["stopped", "behind"]
    assert [KINDS.index(f.kind) for f in found.findings] == sorted(
        KINDS.index(f.kind) for f in found.findings
    )


def test_the_first_difference_counts_and_without_majority_all_are_named() -> None:
    first = changed(2, 8, 0, op="x")
    found = diagnose([dump(0), changed(1, 9, 1, op="y"), first, dump(3)])
    assert found.odd == (2,)
    halves = diagnose([dump(0), dump(1), changed(2, 9, 1, op="x"), changed(3, 9, 1, op="x")])
    assert halves.odd == (0, 1, 2, 3)
    assert "no majority" in halves.verdict


def test_a_rank_that_did_not_look_at_a_buckets_identity_does_not_differ() -> None:
    assert all_but(changed(1, 9, 1, fingerprint="")).odd == ()
    assert all_but(changed(1, 9, 1, fingerprint="", op="x")).odd == (1,)


def test_when_all_have_ended_the_first_is_named_unless_all_went_at_once() -> None:
    gone = [dump(r, reason=ENDED, at=1e9 + (0.0 if r == 2 else 0.3)) for r in range(RANKS)]
    assert diagnose(gone).odd == (2,)
    assert diagnose([replace(d, at=1e9) for d in gone]).odd == ()
    alone = diagnose([gone[2]])
    assert (alone.odd, alone.findings[0].kind) == ((2,), "ended"), "the others could still close"


def test_where_nobody_stands_out_it_is_said_what_all_do() -> None:
    waiting = diagnose([dump(r) for r in range(RANKS)])
    assert (waiting.odd, waiting.findings) == ((), ())
    assert "all handed over bucket 2 of step 9" in waiting.verdict
    outside = diagnose([dump(r, steps=10) for r in range(RANKS)])
    assert "outside backward" in outside.verdict


def test_only_the_newest_start_of_each_run_and_model_counts() -> None:
    old = [dump(r, incarnation="000") for r in range(3)]
    new = [dump(r, incarnation="002") for r in range(2)]
    other = [dump(0, model="other")]
    again = replace(new[1], at=2e9, steps=8)
    groups = newest([*old, *new, *other, again])
    assert [[d.rank for d in g] for g in groups] == [[0, 1], [0]]
    assert groups[0] == [new[0], again]


def test_ranks_of_two_sizes_cannot_be_of_one_start() -> None:
    with pytest.raises(DiagnoseError, match=r"\[4, 8\]"):
        diagnose([dump(0), dump(1, world_size=8)])


def test_text_shows_every_rank_and_what_the_odd_one_does() -> None:
    text = "\n".join(lines(all_but(dump(1, (9, 0)))))
    assert "4 dumps of 4 ranks" in text
    assert text.count("topk 1% allgather") == RANKS
    assert 'File "data.py", line 7 in read' in text
    assert "3 more in its dump" in text
    silent = "\n".join(lines(all_but(dump(1, (9, 0), threads=(Thread(101, "main", "D"),)))))
    assert "did not answer" in silent
    unborn = lines(all_but(dump(1, notes=())))
    assert any(line.split()[0:1] == ["1"] and line.split()[-1] == "-" for line in unborn)


def test_json_has_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 3):
        write(dump(rank), tmp_path)
    (tmp_path / "notes.json").write_text("{}")
    assert main(["diagnose", str(tmp_path), "--output", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (found,) = result["diagnoses"]
    assert (found["odd"], found["findings"][0]["kind"]) == ([2], "missing")
    assert [d["last"]["bucket"] for d in found["dumps"]] == [2, 2, 2]
    assert found == json.loads(json.dumps(as_json(diagnose([dump(0), dump(1), dump(3)]))))
    assert "notes.json" in result["unreadable"][0]


def test_text_comes_on_stdout_and_bad_files_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(RANKS):
        write(dump(rank, (9, 1) if rank == 3 else (9, 2)), tmp_path)
    (tmp_path / "half.json").write_text('{"schema"')
    assert main(["diagnose", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "odd: rank 3: behind" in out
    assert "half.json" in err


@pytest.mark.parametrize("kind", ["nothing there", "a file", "no dumps", "only bad ones"])
def test_what_cannot_be_diagnosed_is_an_error_with_one_reason(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "dumps"
    if kind == "a file":
        folder.touch()
    elif kind != "nothing there":
        folder.mkdir()
    if kind == "only bad ones":
        (folder / "x.json").write_text("[]")
    assert main(["diagnose", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gradpilot: ")
    assert ("x.json" in err) == (kind == "only bad ones")

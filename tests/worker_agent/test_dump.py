from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradpilot.worker_agent import dump as module
from gradpilot.worker_agent.dump import STALLED, Dump, Thread, default_folder, read, write
from gradpilot.worker_agent.flight_recorder import Note

DUMP = Dump(
    run="a/run",
    incarnation="001",
    model="../g net",
    rank=1,
    world_size=4,
    node="n0",
    pid=77,
    reason=STALLED,
    at=1e9,
    idle_seconds=301.5,
    steps=9,
    notes=(Note(1, 9, 0, "b", "none native", 400, 1, 2, 5.0, 77),),
    threads=(Thread(77, "main", "S", "futex_wait", "Stack\n  File x\n"),),
)


def test_a_dump_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = write(DUMP, tmp_path / "new" / "folder")
    assert read(path) == DUMP
    newer = replace(DUMP, steps=10)
    assert write(newer, tmp_path / "new" / "folder") == path
    assert read(path) == newer
    assert path.parent.parent == tmp_path / "new" / "folder", "names do not lead out of the folder"
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_only_the_newest_starts_stay_in_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FOLDERS_KEPT", 3)
    (tmp_path / "the user's own").mkdir()
    for number in (5, 1, 4, 2, 3):
        write(replace(DUMP, run=f"run{9 - number}", incarnation=f"{number:03d}"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 6, "a named folder is the user's business"
    write(replace(DUMP, incarnation="006"), tmp_path, prune=True)
    left = sorted(p.name.rpartition("@")[2] for p in tmp_path.iterdir())
    assert left == ["004", "005", "006", "the user's own"]


def test_somebody_elses_folder_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.lstat().st_uid + 1)
    with pytest.raises(PermissionError, match="GRADPILOT_DUMPS"):
        write(DUMP, tmp_path, prune=True)


def test_the_default_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "some one/else")
    assert default_folder().name == "gradpilot-dumps-some%20one%2Felse"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "other"}, "no 'gradpilot dump 1'"),
        ({"rank": 4}, "rank 4 of 4"),
        ({"rank": "1"}, "rank must be int"),
        ({"world_size": True}, "world_size must be int"),
        ({"extra": 1}, "'extra'"),
        ({"notes": [{"number": 1}]}, "missing"),
        ({"notes": 3}, "'int'"),
        ({"threads": [7]}, "expected an object"),
    ],
)
def test_what_is_no_dump_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = write(DUMP, tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=said):
        read(path)


def test_a_missing_field_is_refused(tmp_path: Path) -> None:
    path = write(DUMP, tmp_path)
    values = json.loads(path.read_text())
    del values["rank"]
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="'rank'"):
        read(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_files_of_another_kind_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="no "):
        read(path)

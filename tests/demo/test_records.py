from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gradpilot.demo.records import (
    EVENTS_FILE,
    KINDS,
    Events,
    Settings,
    first_failure,
    note_failure,
    read_records,
    read_settings,
    write_record,
    write_settings,
)
from tests.demo.planted import SCHEDULE, record


def test_settings_and_records_come_back_whole(tmp_path: Path) -> None:
    settings = Settings("digits", 7, SCHEDULE)
    write_settings(tmp_path, settings)
    assert read_settings(tmp_path) == settings
    for kind in KINDS:
        written = tuple(record(kind, rank) for rank in range(4))
        for one in written:
            write_record(tmp_path, one)
        assert read_records(tmp_path, kind, 4) == written


def test_a_missing_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="adaptive-0"):
        read_records(tmp_path, "adaptive", 1)


def test_events_are_lines_of_json(tmp_path: Path) -> None:
    events = Events(tmp_path)
    events.write("progress", step=3, options=["a b"])
    lines = (tmp_path / EVENTS_FILE).read_text().splitlines()  # at once, not at the end
    events.close()
    assert [json.loads(line) for line in lines] == [
        {"event": "progress", "step": 3, "options": ["a b"]}
    ]


def test_the_first_failure_counts(tmp_path: Path) -> None:
    assert first_failure(tmp_path) == ""
    note_failure(tmp_path, 0, RuntimeError("connection closed by peer"))
    note_failure(tmp_path, 2, ValueError("the cause"))
    os.utime(tmp_path / "failure-2.txt", (1.0, 1.0))
    assert first_failure(tmp_path) == "rank 2: ValueError: the cause"

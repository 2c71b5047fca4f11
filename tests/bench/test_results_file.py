from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import results_file

COMMITTED = sorted(results_file.RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_results_are_well_formed(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert results_file.check(document) == []
    assert path.stem in document["command"]


def test_there_are_committed_results() -> None:
    assert "solver.json" in [path.name for path in COMMITTED]


def written(tmp_path: Path) -> Any:
    path = results_file.write(
        "demo",
        "python -m bench.demo",
        [1, 2],
        [{"what": "step", "ms": 1.5, "all": [1, 2.5]}],
        [results_file.verdict("step, ms", "< 2", 1.5, True)],
        tmp_path / "new" / "demo.json",
    )
    return json.loads(path.read_text(encoding="utf-8"))


def test_what_is_written_is_well_formed(tmp_path: Path) -> None:
    document = written(tmp_path)
    assert results_file.check(document) == []
    assert document["seeds"] == [1, 2]
    assert document["verdicts"] == [
        {"name": "step, ms", "target": "< 2", "measured": 1.5, "holds": True}
    ]
    assert {"python", "numpy"} <= set(document["versions"])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schema": 2}, "schema"),
        ({"schema": True}, "schema"),
        ({"created": "yesterday"}, "created"),
        ({"created": "2026-01-01T00:00:00"}, "time zone"),
        ({"command": ""}, "command"),
        ({"machine": []}, "machine"),
        ({"versions": {}}, "python"),
        ({"seeds": [1.5]}, "seeds"),
        ({"rows": []}, "rows"),
        ({"rows": [{}]}, "rows[0]"),
        ({"rows": [{"ms": float("nan")}]}, "rows[0]"),
        ({"rows": [{"ms": {"deep": 1}}]}, "rows[0]"),
        ({"verdicts": [{"name": "x"}]}, "verdicts[0]"),
        (
            {"verdicts": [{"name": "x", "target": "< 1", "measured": 2, "holds": "no"}]},
            "holds",
        ),
        (
            {"verdicts": [{"name": "x", "target": "", "measured": 2, "holds": True}]},
            "target",
        ),
        (
            {"verdicts": [{"name": "x", "target": "< 1", "measured": None, "holds": True}]},
            "measured",
        ),
        ({"extra": 1}, "extra"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    problems = results_file.check({**written(tmp_path), **change})
    assert any(word in problem for problem in problems)


def test_missing_fields_and_other_things(tmp_path: Path) -> None:
    document = written(tmp_path)
    del document["seeds"]
    assert results_file.check(document) == ["field 'seeds' is missing"]
    assert results_file.check([1]) == ["must be an object, got list"]


def test_nothing_is_written_if_wrong(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    with pytest.raises(ValueError, match="measured"):
        results_file.write(
            "bad",
            "x",
            [],
            [{"a": 1}],
            [results_file.verdict("x", "< 1", float("inf"), False)],
            path,
        )
    assert not path.exists()


def test_files_can_be_checked_by_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    good, bad = tmp_path / "new" / "demo.json", tmp_path / "bad.json"
    bad.write_text('{"schema": 1}')
    assert results_file.main([str(good)]) == 0
    assert results_file.main([str(good), str(bad), str(tmp_path / "none.json")]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"{good}: well-formed"] * 2
    assert "field 'created' is missing" in said[2]
    assert "No such file" in said[3]


def test_a_verdict_that_does_not_hold_is_told_as_such() -> None:
    found = [
        results_file.verdict("ratio", "<= 1.03", 1.05, False),
        results_file.verdict("hangs", "0", 0, True),
    ]
    assert results_file.judged(found) == ["DOES NOT HOLD: ratio <= 1.03: 1.05", "holds: hangs 0: 0"]

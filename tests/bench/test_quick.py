"""The small part of the benchmarks: what makes it fail, and what does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import quick, results_file
from bench.quick import PARTS, Part, judge, main, run

LOST = "sent + residual == corrected, sampled steps, all rows"


def result(path: Path, *verdicts: tuple[str, bool]) -> Path:
    listed = [results_file.verdict(name, "all", "3 of 4", holds) for name, holds in verdicts]
    return results_file.write("trial", "a trial", [0], [{"ms": 1.5}], listed, path)


def test_a_check_that_fails_is_a_failure_and_a_speed_that_is_missed_is_none(
    tmp_path: Path,
) -> None:
    part = PARTS["tta"]
    sound = [("ranks in sync, all rows", True), (LOST, True), ("adaptive / oracle", False)]
    assert judge(result(tmp_path / "a.json", *sound), part) == []
    assert judge(result(tmp_path / "b.json", sound[0], (LOST, False)), part) == [f"{LOST}: 3 of 4"]
    (problem,) = judge(result(tmp_path / "c.json", sound[0]), part)
    assert "nobody looked whether 'sent + residual" in problem


def test_a_result_that_is_none_or_of_another_format_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert "no result" in judge(path, Part(()))[0]
    path.write_text('{"rows": [}')
    assert "no result" in judge(path, Part(()))[0]
    path.write_text('{"rows": []}')
    assert "field 'schema' is missing" in judge(path, Part(()))


def test_a_program_that_fails_or_does_not_end_is_told_and_old_results_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result(tmp_path / "json.json", (LOST, True))
    # A module of the standard library stands in: ``python -m json.tool`` of no file.
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import time; time.sleep({{}}); 1 / 0'\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    text = program.read_text()
    program.write_text(text.format("0"))
    failed, none = run("json", Part(()), small=False, folder=tmp_path)
    assert failed.startswith("ended with 1, see ")
    assert "no result" in none
    assert "ZeroDivisionError" in (tmp_path / "json.txt").read_text()
    program.write_text(text.format("60"))
    (late,) = run("json", Part((), seconds=0.2), small=False, folder=tmp_path)
    assert "was not over after 0 s" in late


def test_without_emulated_hosts_it_says_so_and_fails_only_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quick, "missing", lambda: ["root"])
    monkeypatch.delenv(quick.REQUIRE_ALL, raising=False)
    assert main([]) == 0
    assert capsys.readouterr().err == "bench.quick: skipped: root\n"
    monkeypatch.setenv(quick.REQUIRE_ALL, "1")
    assert main([]) == 1
    assert "needed, since GRADPILOT_REQUIRE_ALL=1: root" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--only", "solver"])


def test_every_part_is_a_program_and_none_writes_among_the_committed_results() -> None:
    root = Path(quick.__file__).parent
    for name, part in PARTS.items():
        assert (root / name / "__main__.py").is_file()
        assert "--quick" in part.arguments
    assert not quick.FOLDER.resolve().is_relative_to(results_file.RESULTS)

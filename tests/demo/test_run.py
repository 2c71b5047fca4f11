from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradpilot.demo import launch, run
from gradpilot.demo.records import Settings
from gradpilot.demo.result import Runs
from gradpilot.demo.table import Table
from tests.demo import schema
from tests.demo.planted import out_of_sync, runs


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[Runs]:
    """Put these runs in place of training."""
    given: list[Runs] = [runs()]

    def train(folder: Path, settings: Settings, table: Table, warm_up: bool) -> Runs:
        return given[0]

    monkeypatch.setattr(run, "_train", train)
    return given


def test_json_is_one_object_and_the_words_go_elsewhere(
    planted: list[Runs], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "r.html"
    arguments = ["--dataset", "digits", "--output", "json", "--report", str(report)]
    assert run.main(arguments) == 0
    printed = capsys.readouterr()
    schema.check(json.loads(printed.out))
    assert "emulated" in printed.err
    assert report.is_file()


def test_text_says_why_and_which_claims_fail(
    planted: list[Runs], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--dataset", "digits", "--report", str(tmp_path / "r.html")]) == 0
    text = capsys.readouterr().out
    assert "why each switch happened" in text
    assert "FAILS  plan switches that changed options: 2 (target >= 3)" in text
    assert "The link is emulated" in text


def test_out_of_sync_fails_the_command(
    planted: list[Runs], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted[0] = out_of_sync()
    assert run.main(["--dataset", "digits", "--report", str(tmp_path / "r.html")]) == 1
    assert "equal at 11 of 12 sampled steps" in capsys.readouterr().err


def test_wrong_arguments_are_told_from_failures(
    planted: list[Runs], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(["--dataset", "digits", "--steps", "3"]) == 2
    assert "at least" in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run.main(["--dataset", "digits", "--report", str(blocked / "r.html")]) == 1


def test_interruption_has_its_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(folder: Path, settings: Settings, table: Table, warm_up: bool) -> Runs:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_train", interrupted)
    assert run.main(["--dataset", "digits"]) == 130


@pytest.mark.processes
def test_a_failing_rank_is_reported_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No settings in the folder: every rank fails at once.
    with (
        pytest.raises(launch.DemoFailedError, match=r"settings\.json"),
        launch.Ranks(tmp_path, 50.0) as ranks,
    ):
        list(ranks.events())


@pytest.mark.processes
@pytest.mark.timeout(190)
def test_the_quick_demo_end_to_end(tmp_path: Path) -> None:
    report = tmp_path / "index.html"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gradpilot.demo", "--quick", "--dataset", "digits"),
            *("--output", "json", "--report", str(report)),
        ],
        capture_output=True,
        text=True,
        timeout=170,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(run.__file__).resolve().parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    schema.check(result)
    assert result["in_sync"] is True
    assert result["link"] == "emulated"
    assert result["world_size"] == 4
    assert result["steps"] == sum(p["last_step"] - p["first_step"] + 1 for p in result["phases"])
    assert result["switches"] >= 2
    assert result["decisions"]
    assert all(d["reason"] and d["front"] for d in result["decisions"])
    slow = result["phases"][1]
    assert slow["options"] != ["bf16 native"]
    assert slow["step_seconds"] < slow["baseline_step_seconds"]
    assert "<svg" in report.read_text(encoding="utf-8")

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradpilot import cli

SHORT = ["--steps", "120", "--seconds", "60", "--interval", "10", "--model", "resnet50"]


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["simulate", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = simulate(capsys, *SHORT, *arguments, "--output", "json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = simulate(capsys, *SHORT, "--policy", "adaptive,fixed:bf16", "--explain")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert {"POLICY", "adaptive", "fixed", "best", "oracle", "TOTAL"} <= set(rows)
    assert "fixed bf16 native" in out
    assert "bf16 native is fixed" in out  # the reason of its one switch


def test_json_says_the_same_and_is_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--policy", "adaptive,fixed:topk ratio=0.03 collective=allgather")
    assert found == as_json(
        capsys, "--policy", "adaptive,fixed:topk ratio=0.03 collective=allgather"
    )
    assert found != as_json(capsys, "--policy", "adaptive", "--seed", "1")
    adaptive, fixed = found["policies"]
    assert adaptive["policy"] == "adaptive"
    assert fixed["switches"][0]["options"] == ["topk 3% allgather"]
    for policy in found["policies"]:
        assert policy["regret"] == pytest.approx(policy["seconds"] / found["oracle_seconds"] - 1)
        assert policy["mean_step_seconds"] == policy["seconds"] / policy["steps"]


def test_traces_go_out_and_come_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text, _ = simulate(capsys, "--trace", "burst", "--seconds", "60", "--print-trace")
    assert code == 0
    path = tmp_path / "burst.csv"
    path.write_text(text)
    assert as_json(capsys, "--trace", str(path), "--policy", "fixed:bf16")["trace"] == "burst.csv"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nothing"], "unknown trace 'nothing'"),
        (["--trace", "nothing.csv"], "nothing.csv"),
        (["--policy", "nothing"], "unknown policy 'nothing'; known: "),
        (["--policy", "adaptive:bf16"], "only fixed takes an option"),
        (["--policy", "fixed:powersgd"], "cannot do powersgd"),
        (["--policy", ","], "at least one name"),
        (["--ranks", "1"], "2 .. 4096"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--seed", "-1"], "--seed must not be negative"),
        (["--link", "1"], "--link needs"),
        (["--link", "1,-1"], "--link needs"),
    ],
)
def test_wrong_usage_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = simulate(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_neither_torch_nor_grpc_is_loaded() -> None:
    code = (
        "import sys\n"
        "from gradpilot.cli import main\n"
        "main(['simulate', '--steps', '20', '--policy', 'fixed', '--link', '1,10'])\n"
        "sys.exit(bool({'torch', 'grpc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "oracle" in done.stdout

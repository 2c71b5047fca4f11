"""A whole row of the benchmark, on emulated hosts: training, controller, schedule, checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import results_file
from bench.netlab import leftovers, missing
from bench.tta.__main__ import main
from bench.tta.rows import lab_name
from tests.conftest import require_tool

# Alone on two cores it takes a fifth of that.
pytestmark = [pytest.mark.tools, pytest.mark.processes, pytest.mark.timeout(150)]

STEPS = 6


def netlab() -> bool:
    return not missing()


def test_a_row_is_measured_kept_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_tool(
        netlab, "root, iproute2, iptables, and a kernel with veth, bridge, HTB and NFQUEUE"
    )
    wanted = ["--rows", "transformer/c1/adaptive/0", "--ranks", "2", "--steps", str(STEPS)]
    wanted += ["--folder", str(tmp_path), "--output", "json"]
    assert main(wanted) == 0
    first = json.loads(capsys.readouterr().out)
    assert results_file.check(first) == []
    row = first["rows"][0]
    assert row["steps"] == STEPS
    assert row["in_sync"]
    assert row["sync_checks"] == [4, 4]
    assert row["conserved_checks"] == [4, 4]
    assert row["evaluated_steps"] == list(range(STEPS))
    assert row["values"][-1] < row["values"][0]  # it learned something
    assert row["evaluated_seconds"] == sorted(row["evaluated_seconds"])
    # A dense gradient of 1.6 MB a step, once to and once from each of two hosts; acknowledgements,
    # reports and, with luck, a bf16 step or two.
    assert all(0.4 * STEPS < sent / 1.56 < 1.3 * STEPS for sent in row["sent_mb"])
    assert row["plans"][0] == "none native"
    judged = {v["name"]: v["holds"] for v in first["verdicts"]}
    assert judged["ranks in sync, sampled steps, all rows"]
    assert judged["sent + residual == corrected, sampled steps, all rows"]
    figures = sorted((tmp_path / "figures").glob("*.svg"))
    assert [f.name for f in figures] == [
        "tta-transformer-c1-0-reached.svg",
        "tta-transformer-c1-0-steps.svg",
    ]
    assert leftovers(lab_name(tmp_path)) == []

    # A finished row is kept: what is reported now is the same training.
    assert main(wanted) == 0
    again = capsys.readouterr()
    assert "finished before" in again.err
    assert json.loads(again.out)["rows"] == first["rows"]

"""From finished rows to targets, orders of the oracle, verdicts and figures."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import results_file
from bench.netlab import Link
from bench.tta import figures, oracle, reached, report
from bench.tta.cpu import Snapshot
from bench.tta.matrix import Row
from bench.tta.methods import METHODS
from bench.tta.networks import NETWORKS
from bench.tta.rows import phase_key
from bench.tta.store import Store
from bench.tta.tasks import TASKS
from gradpilot.protos.messages import BF16, Option
from tests.bench.tta_rows import finished

# --- targets -------------------------------------------------------------------------------------


def test_smoothing_is_a_trailing_mean_that_one_lucky_value_does_not_move_far() -> None:
    assert reached.smooth([3.0, 6.0, 9.0, None, 3.0]) == [None, None, 6.0, None, None]
    lucky = reached.smooth([0.5, 0.5, 0.95, 0.5, 0.5])
    assert reached.when(range(5), lucky, 0.7, more=True) is None


def test_a_target_is_reached_between_two_evaluations() -> None:
    smoothed = [None, 0.6, 0.8, 0.9]
    places = [1.0, 2.0, 3.0, 4.0]
    assert reached.when(places, smoothed, 0.7, more=True) == pytest.approx(2.5)
    assert reached.when(places, smoothed, 0.5, more=True) == 2.0  # not known any better
    assert reached.when(places, smoothed, 0.95, more=True) is None
    falling = [3.0, 2.0, None, 1.0]
    assert reached.when(places, falling, 2.5, more=False) == pytest.approx(1.5)
    assert reached.when(places, falling, 1.0, more=False) == 4.0


def test_the_target_is_one_that_all_seeds_reach() -> None:
    easy, hard = finished(gains=0.25), finished(gains=1.0)
    task = TASKS["cnn"]
    assert reached.strictest([easy, hard], task) == reached.strictest([easy], task)
    assert reached.strictest([hard], task) == task.targets[-1]
    assert reached.strictest([], task) is None


# --- oracle --------------------------------------------------------------------------------------


def test_the_oracle_takes_time_and_steps_together() -> None:
    seconds = {"bf16": 0.2, "topk": 0.1, "topkc": 0.01}
    assert oracle.choose(seconds, {"bf16": 100, "topk": 150}) == "topk"
    assert oracle.choose(seconds, {"bf16": 100, "topk": 250}) == "bf16"


def test_the_oracle_is_told_when_phases_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = phase_key(Link(rate_mbit=1000, rtt_ms=0.4), 0.0)
    swept: list[list[Option]] = []

    def sweep(row: Row, folder: Path, options: list[Option]) -> dict[str, list[float]]:
        swept.append(list(options))
        links = {phase_key(*phase.state) for phase in NETWORKS["c1"].phases}
        return {key: [0.02, 0.03] if key == fast else [0.5, 0.1] for key in links}

    monkeypatch.setattr(oracle, "sweep", sweep)
    store = Store(tmp_path)
    row = Row("cnn", "c1", "oracle", 0, 4, 100)
    rows = [finished("bf16"), finished("topk", gains=0.8), finished("adaptive", gains=9.0)]
    found = oracle.pins(row, store, rows)
    assert swept == [[BF16, METHODS["topk"].start(4)]]
    assert [pin.option.compressor for pin in found[:5]] == ["bf16", "topk", "topk", "topk", "bf16"]
    assert [pin.seconds for pin in found[:3]] == pytest.approx([0.0, 20.0, 40.0])
    assert oracle.pins(row, store, rows) == found
    assert len(swept) == 1  # a sweep is kept, too
    with pytest.raises(oracle.NothingKnownError, match="static methods"):
        oracle.pins(row, store, [finished("adaptive")])


# --- report --------------------------------------------------------------------------------------


def _verdicts(rows: list[dict[str, Any]]) -> dict[str, tuple[Any, bool]]:
    return {v["name"]: (v["measured"], v["holds"]) for v in report.verdicts(rows)}


def _one(found: dict[str, tuple[Any, bool]], pattern: str) -> tuple[Any, bool]:
    (hit,) = [value for name, value in found.items() if re.search(pattern, name)]
    return hit


def test_changing_networks_compare_with_bf16_the_best_static_and_the_oracle() -> None:
    rows = [
        one
        for seed in range(3)
        for one in (
            finished("fp32", 0.3, seed=seed),
            finished("bf16", 0.2 + 0.01 * seed, seed=seed),
            finished("topk", 0.12, seed=seed),
            finished("adaptive", 0.1, seed=seed),
            finished("oracle", 0.095, seed=seed),
        )
    ]
    found = _verdicts(rows)
    assert _one(found, r"bf16 / adaptive.* median of 3, 2\.000 to 2\.200") == (2.1, True)
    assert _one(found, "best topk / adaptive") == (1.2, False)
    assert _one(found, "adaptive / oracle") == (1.053, True)
    assert _one(found, "behind fp32") == (0.0, True)
    assert _one(found, "in sync") == ("60 of 60", True)


def test_constant_networks_compare_with_the_best_static_method() -> None:
    rows = [
        finished("fp32", 0.1, network="fast"),
        finished("bf16", 0.11, network="fast"),
        finished("flexible", 0.01, network="fast"),  # no static method
        finished("adaptive", 0.105, network="fast"),
    ]
    assert _one(_verdicts(rows), "adaptive / best fp32") == (1.05, False)


def test_what_is_not_reached_or_worse_in_the_end_does_not_hold() -> None:
    rows = [finished("bf16"), finished("adaptive", gains=0.1)]
    found = _verdicts(rows)
    assert _one(found, "c1: bf16 / adaptive") == ("not reached in 1 of 1 seeds", False)
    measured, holds = _one(found, "adaptive behind bf16, points")
    assert not holds
    assert measured > 10
    gone = finished("adaptive", values=[None] * 10)
    assert _one(_verdicts([finished("bf16"), gone]), "points") == ("diverged", False)


def test_a_slow_host_must_be_named_and_not_taken_for_a_slow_link() -> None:
    decision = {"slowest_rank": 3, "link_mbit": 470.0}
    others = [finished("bf16", network="slow-host")]
    right = [finished("adaptive", network="slow-host", decisions=[{}, decision])]
    found = _verdicts(others + right)
    assert _one(found, "names the slow host") == ("1 of 1", True)
    assert _one(found, "link estimate") == (-1.7, True)
    blamed = {"slowest_rank": -1, "link_mbit": 200.0}
    wrong = finished("adaptive", network="slow-host", decisions=[decision, blamed], seed=1)
    found = _verdicts([*others, *right, wrong])
    assert _one(found, "names the slow host") == ("1 of 2", False)
    assert _one(found, "link estimate") == (-58.2, False)


def test_a_check_that_fails_is_a_verdict_that_does_not_hold() -> None:
    rows = [finished(), finished("topk", sync_checks=[3, 4], conserved_checks=[0, 0])]
    found = _verdicts(rows)
    assert _one(found, "in sync") == ("7 of 8", False)
    assert _one(found, "corrected") == ("4 of 4", True)


def test_a_result_file_is_well_formed_and_its_figures_can_be_read(tmp_path: Path) -> None:
    rows = [
        finished("bf16", 0.2),
        finished("topk", 0.1, values=[None] * 10),
        finished("adaptive", 0.1),
        finished("bf16", 0.2, seed=1),
    ]
    path = results_file.write(
        "tta", "a test", [0, 1], report.rows(rows), report.verdicts(rows), tmp_path / "r.json"
    )
    document = json.loads(path.read_text())
    kinds = [row["kind"] for row in document["rows"]]
    assert kinds == ["training"] * 4 + ["summary"] * 3
    summary = document["rows"][4]
    assert (summary["method"], summary["seeds"], summary["reached"]) == ("bf16", [0, 1], 2)
    assert summary["target_seconds_median"] == document["rows"][0]["target_seconds"][-1]
    text = report.text(rows, document["verdicts"])
    assert "cnn on c1: schedule C1" in text
    drawn = figures.write(rows, tmp_path)
    assert [p.name for p in drawn] == ["tta-cnn-c1-0-reached.svg", "tta-cnn-c1-0-steps.svg"]
    for one in drawn:
        ET.fromstring(one.read_text())
        assert "adaptive" in one.read_text()
    assert "topk 1% allgather" in drawn[1].read_text()


def test_a_machine_that_others_use_is_a_verdict_that_does_not_hold(tmp_path: Path) -> None:
    rows = [finished(), finished("topk", others_cpu=0.4)]
    assert _one(_verdicts(rows), "other programs") == (40.0, False)
    (tmp_path / "7").mkdir()

    def moment(user: int, idle: int, own: int) -> Snapshot:
        (tmp_path / "stat").write_text(f"cpu {user} 0 0 {idle} 5 0 0 0 0 0\ncpu0 1\n")
        fields = " ".join(["0"] * 11)
        (tmp_path / "7" / "stat").write_text(f"7 (a) b) {fields} {own} 0 0\n")
        return Snapshot.take([7, 8], tmp_path)

    before, after = moment(100, 100, 50), moment(400, 300, 250)
    ticks = os.sysconf("SC_CLK_TCK")
    assert after.busy - before.busy == 300 / ticks
    assert replace(after, at=before.at + 2.0).others(before, 2) == (300 - 200) / ticks / 4.0

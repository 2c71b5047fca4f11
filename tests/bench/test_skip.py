"""Planted times and accuracies for the arithmetic, small real runs for the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import results_file
from bench.claims.training import Job
from bench.netlab import Link
from bench.network_model.ranks import Ranks
from bench.skip import __main__ as command
from bench.skip import accuracy, timing
from bench.skip.accuracy import ALL_CLASSES, ONE_CLASS, Variant, climb
from bench.skip.training import most_important, train
from gradpilot.protos.messages import DENSE

SETUP = timing.Setup(ranks=(4,), megabytes=(4,), blocks=3)


def planted(factor: Callable[[int], float] = lambda skip: 1.0) -> list[dict[int, float]]:
    """Return three blocks, ever slower, in which time follows the steps up to a factor."""
    return [{s: pace * (6 - s) * factor(s) for s in range(4)} for pace in (0.1, 0.2, 0.3)]


def test_time_in_proportion_to_steps_holds_whatever_the_pace_of_a_block() -> None:
    rows = timing.rows(planted(), 4, 4, SETUP)
    assert [row["steps"] for row in rows] == [6, 5, 4, 3]
    assert [row["speedup"] for row in rows] == [1.0, 1.2, 1.5, 2.0]
    assert all(row["over_steps"] == 1.0 for row in rows[1:])
    assert rows[0]["measured_ms"] == pytest.approx(1200)
    assert all(v["holds"] for v in timing.verdicts(rows))


def test_the_row_that_foretells_is_not_judged() -> None:
    rows = timing.rows(planted(), 4, 4, SETUP)
    assert "over_steps" not in rows[0]
    assert "over_link" in rows[0]


def test_a_step_count_that_time_does_not_follow_is_seen() -> None:
    rows = timing.rows(planted(lambda skip: 1.04 if skip == 2 else 1.0), 4, 4, SETUP)
    follows, bound = timing.verdicts(rows)
    assert follows["measured"] == pytest.approx(4.0)
    assert not follows["holds"]
    assert bound["holds"]  # slower than it could be, not faster


def test_faster_than_can_be_is_seen() -> None:
    rows = timing.rows(planted(lambda skip: 0.9 if skip == 3 else 1.0), 4, 4, SETUP)
    follows, bound = timing.verdicts(rows)
    assert not follows["holds"]
    assert not bound["holds"]
    assert bound["measured"] == pytest.approx(1 / 0.9, rel=1e-3)


def test_the_link_foretells_by_the_cost_model() -> None:
    link = Link(rate_mbit=100, rtt_ms=2)
    # Five steps of 1 MB and 1 ms, and once 1 ms as receives are posted early.
    expected = 5 * (1e-3 + 1e6 * 8 / 100e6 * 1514 / 1448) + 1e-3
    assert timing.link_seconds(4, 1, 4, link) == pytest.approx(expected)


@pytest.mark.processes
def test_rings_that_skip_are_timed_over_loopback() -> None:
    setup = timing.Setup(ranks=(2,), megabytes=(1,), blocks=2)
    with Ranks(2, None, 60.0) as processes:
        timed = timing.blocks(processes, 2, 1, setup)
    assert [sorted(block) for block in timed] == [[0, 1]] * 2
    rows = timing.rows(timed, 2, 1, setup)
    assert all(0 < row["least_ms"] <= row["measured_ms"] <= row["most_ms"] for row in rows)


@pytest.mark.parametrize(("peak", "found"), [(-9, -3), (-2, -2), (0, 0), (1, 1), (3, 3), (9, 3)])
def test_a_search_climbs_to_the_top_or_as_far_as_it_may(peak: int, found: int) -> None:
    asked: list[float] = []

    def score(rate: float) -> float:
        asked.append(rate)
        return -abs(math.log2(rate / 0.05) - peak)

    assert climb(0.05, score) == 0.05 * 2.0**found
    assert len(asked) == len(set(asked))
    assert len(asked) <= 3 + abs(peak)


def row(data: str, skip: int, choice: str, value: float, **more: Any) -> dict[str, Any]:
    known = {"data": data, "skip": skip, "choice": choice, "divisor": "skip" if skip else ""}
    return {**known, "feedback": False, "accuracy_percent": value, **more}


def test_claims_about_accuracy() -> None:
    rows = [
        row(ONE_CLASS, 0, "", 80.0),
        row(ONE_CLASS, 2, "static", 60.0),
        row(ONE_CLASS, 2, "random", 77.0),
        row(ONE_CLASS, 2, "random", 76.0, feedback=True),
        row(ALL_CLASSES, 4, "random", 80.0),
        row(ALL_CLASSES, 4, "random", 80.2, divisor="drop"),
        row(ALL_CLASSES, 4, "random", 80.1, divisor="shrink"),
    ]
    found = {(v["measured"], v["holds"]) for v in accuracy.verdicts(rows)}
    # Random less static; all-reduce less random; feedback; between divisors.
    assert found == {(17.0, True), (3.0, False), (-1.0, False), (0.2, True)}
    assert accuracy.verdicts(rows[:1]) == []


def test_options_of_variants() -> None:
    assert Variant(0).option(0.1) == DENSE
    shrunk = Variant(4, divisor="shrink").option(0.25)
    assert shrunk.shrink == 0.5  # 0.25 / (0.25 + 1 / 4)
    assert Variant(2, "static", feedback=True).option(-1).skip_feedback
    names = [Variant(2, "static").choice, Variant(2).choice, Variant(2, selective=True).choice]
    assert names == ["static", "random", "selective"]
    every = accuracy.FULL.all_classes
    assert len(every) == len(set(every))


def test_the_bucket_with_the_largest_elements_matters_most() -> None:
    small, large = torch.full((3000,), 0.01), torch.full((1000,), 1.0)
    assert most_important([[small, small], [large, large]]) == 1
    assert most_important([[large, large], [small, small]]) == 0


def test_what_is_spared_is_trained_as_if_nothing_were_skipped() -> None:
    job = Job(4, 23, 4, rate=0.05, momentum=0.9, hidden=8)
    option = Variant(2).option(-1)
    plain, spared = (train(job, option, 0, selective=s) for s in (False, True))
    assert plain.spared == 0
    assert 0 < spared.spared < 1
    assert plain.held_out != spared.held_out


def test_a_part_alone_is_written_aside_and_well_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = accuracy.Setup(10, (0,), (Variant(4),), (Variant(2, "static"),))
    monkeypatch.setattr(accuracy, "QUICK", tiny)
    path = tmp_path / "skip.json"
    asked = ["--quick", "--part", "accuracy", "--output", "json", "--result", str(path)]
    assert command.main(asked) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(path.read_text())
    assert results_file.check(document) == []
    assert document["command"] == "python -m bench.skip --quick --part accuracy"
    assert [(r["data"], r["skip"]) for r in document["rows"]] == [
        (ALL_CLASSES, 0), (ALL_CLASSES, 4), (ONE_CLASS, 0), (ONE_CLASS, 2),
    ]  # fmt: skip
    dense = document["rows"][0]
    assert dense["less_than_dense_points"] == dense["less_at_dense_rate_points"] == 0
    assert "all-reduce" in command.text(document["rows"], document["verdicts"])

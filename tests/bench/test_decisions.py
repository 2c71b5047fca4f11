from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench import decisions, results_file
from bench.decisions import Place, case_at, verdicts
from gradpilot.policies.base import POLICIES


def row(policy: str = "adaptive", **fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "kind": "steps", "model": "cnn", "ranks": 4, "policy": policy, "seconds": 10.0,
        "regret": 0.02, "versus_fixed": 1.0, "switches": 2, "least_gap": 50, "below_floor": 0.0,
    }  # fmt: skip
    return {**values, **fields}


GOOD = (
    row(),
    row(kind="constant", versus_fixed=1.02),
    *(row(name, seconds=14.0) for name in decisions.RIVALS),
)


def holding(cases: tuple[dict[str, Any], ...], answers: tuple[dict[str, Any], ...]) -> list[bool]:
    return [one["holds"] for one in verdicts(cases, answers)]


@pytest.mark.parametrize(
    ("cases", "answers", "failing"),
    [
        (GOOD, ({"periods": 1.9},), None),
        ((*GOOD, row(kind="constant", regret=0.14)), ({"periods": 1.9},), 0),
        (
            (*GOOD, *[row(kind="constant")] * 9, row(kind="constant", regret=0.16)),
            ({"periods": 1.9},),
            1,
        ),
        ((*GOOD, row(kind="constant", versus_fixed=1.04)), ({"periods": 1.9},), 2),
        ((*GOOD, row(kind="constant", least_gap=10)), ({"periods": 1.9},), 3),
        ((row(), row(kind="constant"), row("kimad", seconds=12.0)), ({"periods": 1.9},), 4),
        (GOOD, ({"periods": 1.9}, {"periods": 2.1}), 5),
        (GOOD, ({"periods": None},), 5),
    ],
)
def test_verdicts_can_fail_one_by_one(
    cases: tuple[dict[str, Any], ...], answers: tuple[dict[str, Any], ...], failing: int | None
) -> None:
    assert holding(cases, answers) == [i != failing for i in range(6)]


def test_cases_last_as_many_decision_periods() -> None:
    case = case_at(Place("steps", 1, "resnet50", 8, 40))
    assert math.isfinite(case.trace.period)
    assert case.trace.period >= 40 * case.timing.decision_seconds
    assert case_at(Place("steps", 1, "resnet50", 1024, 40)).world.backend == "nccl"


def test_all_policies_take_part_and_the_file_is_well_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "reactions", lambda *_: iter(()))
    path = tmp_path / "decisions.json"
    decisions.main(["--quick", "--output", str(path)])
    document = json.loads(path.read_text())
    assert results_file.check(document) == []
    names = {entry["policy"] for entry in document["rows"]}
    assert names >= set(POLICIES.names()) - {"fixed"}
    assert {"fixed none native", "fixed bf16 native"} <= names

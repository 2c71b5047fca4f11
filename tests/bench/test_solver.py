from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import results_file, solver
from gradpilot.policies.problem import Space


def test_the_wide_space_has_about_five_thousand_candidates() -> None:
    inputs = solver.make_inputs(solver.twenty_buckets(), 178)
    assert len(inputs.layout.buckets) == 20
    assert len(Space(inputs, solver.LINK)) == 5002


def test_a_front_has_no_gap_to_itself() -> None:
    inputs = solver.make_inputs([2_000_000, 20_000], 5, ranks=4)
    exact = Space(inputs, solver.LINK).uniform()
    same = solver.gap(exact, exact, inputs.settings)
    for name in ("front_found_share", "found_on_front_share", "hypervolume_ratio", "cost_ratio"):
        assert same[name] == pytest.approx(1)


def test_hypervolume_by_hand() -> None:
    reference = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert solver.hypervolume(reference, reference) == pytest.approx(0.1 * 1.1 + 0.1 * 1.0)


def test_it_writes_a_well_formed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(solver, "SEEDS", (0,))
    solver.main(["--output", str(tmp_path / "solver.json"), "--repeats", "1"])
    document = json.loads((tmp_path / "solver.json").read_text(encoding="utf-8"))
    assert results_file.check(document) == []
    assert len(document["verdicts"]) == 9
    assert "exact enumeration of 5002 candidates" in capsys.readouterr().out


def test_the_other_space_has_about_five_hundred_candidates() -> None:
    inputs = solver.make_inputs(solver.twenty_buckets(), solver.HALF_THOUSAND)
    assert len(Space(inputs, solver.LINK)) == 494
    assert Space(inputs, solver.LINK).groups().max() == 3

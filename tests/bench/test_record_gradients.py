from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import record_gradients
from bench._recorded_tasks import TASKS
from bench.record_gradients import OPTIONS, PHASES, buckets, family_forms, train
from gradpilot.simulate.recorded import document


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_forms_are_those_in_the_package() -> None:
    """If this fails, what agents can do has changed: record again."""
    assert json.loads(json.dumps(family_forms())) == document()["families"]


def test_buckets_are_in_the_order_of_backward_and_hold_everything() -> None:
    for name, recorded in zip(TASKS, document()["tasks"], strict=True):
        model = TASKS[name].model(0)
        groups = buckets(model)
        parameters = [p for group in groups for p in group]
        assert [id(p) for p in parameters] == [id(p) for p in reversed(list(model.parameters()))]
        assert [sum(p.numel() for p in group) for group in groups] == recorded["elements"]
        assert recorded["name"] == name
        assert len(recorded["ready_seconds"]) == len(groups)


def test_a_short_training_says_what_agents_would() -> None:
    dense, topk = (train(TASKS["mlp"], option, 20) for option in OPTIONS[:2])
    assert len(dense["phases"]) == PHASES
    for phase, compressed in zip(dense["phases"], topk["phases"], strict=True):
        for bucket, less in zip(phase, compressed, strict=True):
            assert bucket["gain"] == 1
            assert bucket["residual_sq"] == 0
            assert 0 < bucket["mean_sq"] <= bucket["gradient_sq"]
            assert 0 < less["gain"] < 1
            assert less["residual_sq"] > 0
            assert less["gradient_sq"] * (1 - less["gain"]) == pytest.approx(
                less["residual_sq"], rel=0.2
            )  # means of products, not products of means


def test_the_file_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_gradients, "OPTIONS", OPTIONS[:1])
    monkeypatch.setattr(record_gradients, "calibration", list)
    path = tmp_path / "recorded.json"
    arguments = ["--output", str(path), "--tasks", "mlp", "--steps", "20"]
    assert record_gradients.main(arguments) == 0
    made = json.loads(path.read_text())
    assert set(made) == set(document())
    assert set(made["tasks"][0]) == set(document()["tasks"][0])
    assert set(made["tasks"][0]["runs"][0]) == set(document()["tasks"][0]["runs"][0])

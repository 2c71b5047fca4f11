from __future__ import annotations

import numpy as np
import pytest

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import BF16, DENSE, Setting
from gradpilot.simulate.jobs import JOBS, make_job
from gradpilot.simulate.recorded import Gradients, document, task

TOPK = ("topk", ())
STAR = ("artopk", (Setting("selection", "star"),))


@pytest.mark.parametrize("name", ["cnn", "mlp", "transformer"])
def test_what_was_recorded_is_plausible(name: str) -> None:
    found = task(name)
    assert {run.key[0] for run in found.runs} == {"none", "topk", "artopk"}
    for run in found.runs:
        gains, squares = run.values[:, :, 0], run.values[:, :, 1:]
        assert ((gains > 0) & (gains <= 1)).all()
        assert (squares >= 0).all()
        assert (np.diff(run.energy, axis=2) >= -1e-3).all()
        assert run.energy[:, :, -1] == pytest.approx(1.0)
        if run.key == TOPK:  # top-k sends exactly the energy of the largest elements
            at = {0.1: (9, 0.12), 0.01: (6, 0.015), 0.001: (2, 0.001)}[run.ratio]
            assert (gains <= run.energy[:, :, at[0]] + 0.05).all()


def test_training_was_real() -> None:
    for entry in document()["tasks"]:
        dense = entry["runs"][0]
        assert dense["compressor"] == "none"
        assert dense["loss"][1] < 0.7 * dense["loss"][0]
    assert {"command", "seed", "versions", "machine", "ranks", "steps"} <= set(document())


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("key", [TOPK, STAR])
def test_gains_grow_with_the_ratio_and_pass_through_what_was_measured(
    name: str, key: tuple[str, tuple[Setting, ...]]
) -> None:
    gradients = make_job(name).gradients
    ratios = np.geomspace(1e-5, 1, 40)
    for progress in (0.0, 0.4, 1.0):
        gains = gradients.gain(key, ratios, progress)
        assert (np.diff(gains, axis=0) >= -1e-9).all()
        assert gains[-1] == pytest.approx(1.0)
    run = next(r for r in gradients.task.runs if r.key == key and r.ratio == 0.01)
    alone = Gradients(gradients.task, range(len(gradients.task.elements)), gradients.task.elements)
    middle_of_the_first_phase = 0.5 / len(run.values)
    seen = alone.seen(key, 0.01, middle_of_the_first_phase, gradients.task.ranks)
    assert seen.gain == pytest.approx(run.values[0, :, 0])
    assert seen.gradient_sq == pytest.approx(run.values[0, :, 1])
    assert seen.energy == pytest.approx(run.energy[0])


def test_who_keeps_everything_loses_nothing_and_others_must_be_recorded() -> None:
    gradients = make_job("cnn").gradients
    for option in (DENSE, BF16):
        assert (gradients.seen(option.family, 1.0, 0.5, 8).gain == 1).all()
        assert (gradients.gain(option.family, np.ones(1), 0.5) == 1).all()
    with pytest.raises(ConfigError, match="no training was recorded under 'powersgd'"):
        gradients.gain(("powersgd", ()), np.array([0.5]), 0.5)
    with pytest.raises(ConfigError, match="there are: cnn"):
        task("nothing")


def test_squares_follow_elements_and_ranks() -> None:
    recorded = task("cnn")
    one = Gradients(recorded, (1, 1), (1000, 3000))
    assert one.weights(0.5) == pytest.approx([0.25, 0.75])
    many = [one.seen(DENSE.family, 1.0, 0.5, n).mean_sq[0] for n in (2, 4, 64, 4096)]
    assert many == sorted(many, reverse=True)  # the mean over more ranks has less noise
    assert many[-1] > 0

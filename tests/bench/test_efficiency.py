from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch import nn

from bench import efficiency, results_file
from bench.efficiency_runs import analysis, divergence, models, report, summary, sweep, tasks
from bench.efficiency_runs.methods import BASELINE, METHODS, STRESSED, named
from bench.efficiency_runs.models import Points
from bench.efficiency_runs.statistics import Watch
from bench.efficiency_runs.training import EVERY, RANKS, Run, train
from gradpilot.worker_agent.compressors.base import COMPRESSORS
from gradpilot.worker_agent.plan import compile_option
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step

EVERYTHING_ARRIVES = ("none", "bf16", "fp16")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(name: str = "images") -> tasks.Task:
    """Five well separated classes and a linear model of 85 parameters."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 16, generator=draw)

    def samples(count: int) -> tasks.Samples:
        y = torch.arange(count) % 5
        return tasks.Samples(centres[y] + 0.5 * torch.randn(count, 16, generator=draw), y)

    def model() -> nn.Module:
        return nn.Linear(16, 5)

    train_, held, test = samples(500), samples(100), samples(100)
    return tasks.Task(name, "made up", train_, held, test, 5, model, batch=8, rate=0.05)


# --- curves ---------------------------------------------------------------------------------------


def test_a_target_is_reached_between_two_evaluations() -> None:
    curve = [3.0, 2.0, 2.5, 1.0]
    assert analysis.steps_to(curve, 10, 2.25, start=4.0) == pytest.approx(17.5)
    assert analysis.steps_to(curve, 10, 3.5, start=4.0) == pytest.approx(5.0)
    assert analysis.steps_to(curve, 10, 4.0, start=4.0) == 0.0
    assert math.isnan(analysis.steps_to(curve, 10, 0.9, start=4.0))


def test_smoothing_keeps_a_straight_line_but_for_its_ends() -> None:
    line = np.arange(7.0)
    assert analysis.smooth(line)[1:-1] == pytest.approx(line[1:-1])
    assert analysis.smooth([0.0, 3.0, 0.0, 0.0])[1] == 1.0


@pytest.mark.parametrize("times", [1.0, 1.25, 1.6])
def test_efficiency_is_how_many_times_slower_a_curve_falls(times: float) -> None:
    at = np.arange(1, 41) * 10
    dense, slow = 4.0 - at / 400.0, 4.0 - at / 400.0 / times
    found, reached = analysis.efficiency(dense, slow, analysis.targets(dense), 10, 4.0, 400)
    assert found == pytest.approx(1 / times)
    assert reached == 1.0


def test_a_target_that_is_not_reached_counts_by_what_was() -> None:
    at = np.arange(1, 41) * 10
    dense, slow = 4.0 - at / 400.0, 4.0 - at / 400.0 / 5.0
    found, reached = analysis.efficiency(dense, slow, analysis.targets(dense), 10, 4.0, 400)
    assert found == pytest.approx(0.2)
    assert reached == 0.0
    found, reached = analysis.efficiency(dense, [], analysis.targets(dense), 10, 4.0, 400)
    assert found == pytest.approx(analysis.WORST)
    assert reached == 0.0


# --- what statistics are worth --------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=30))
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    x, y = map(np.array, zip(*pairs, strict=True))
    found = analysis.rank_correlation(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert found == 0.0
    else:
        assert found == pytest.approx(spearmanr(x, y).statistic)


def test_the_interval_of_a_rank_correlation_is_wide_for_noise_and_narrow_for_order() -> None:
    x = np.arange(40.0)
    low, high = analysis.interval(x, x**3)
    assert [low, high] == pytest.approx([1.0, 1.0])
    noise = np.random.default_rng(0).normal(size=40)
    low, high = analysis.interval(x, noise)
    assert low < analysis.rank_correlation(x, noise) < high
    assert high - low > 0.3


def test_the_exponent_of_a_family_is_recovered_with_its_error() -> None:
    gains = np.array([0.9, 0.5, 0.1, 0.01])
    exact = analysis.exponent(gains, gains**0.37)
    assert [exact.exponent, exact.rms] == pytest.approx([0.37, 0.0])
    shaken = analysis.exponent(gains, gains**0.37 * np.array([1.1, 0.9, 1.1, 0.9]))
    assert abs(shaken.exponent - 0.37) < 2 * shaken.error
    assert 0.05 < shaken.rms < 0.15
    flat = analysis.exponent([1.0, 0.98], [0.7, 0.7])
    assert math.isnan(flat.exponent)
    assert flat.mean == pytest.approx(0.7)


def test_a_threshold_separates_what_can_be_separated() -> None:
    clean = analysis.threshold([1, 2, 3, 40, 50], [False, False, False, True, True])
    assert (clean.alarms, clean.misses, clean.area) == (0.0, 0.0, 1.0)
    assert 3 < clean.at < 40
    values, bad = [1, 2, 3, 4, 5, 6], [False, True, False, True, False, True]
    mixed = analysis.threshold(values, bad)
    assert mixed.area == pytest.approx(6 / 9)
    assert analysis.threshold(values, bad, most_alarms=0.0).at > 5
    with pytest.raises(ValueError, match="both kinds"):
        analysis.threshold([1, 2], [True, True])


def planted(e: float, c: float) -> Points:
    x = np.geomspace(0.01, 100, 24)
    return Points(
        ("images", "text") * 12,
        ("a", "a", "b", "b") * 6,
        {"drag": x, "gain": 1 / (1 + x)},
        (1 + x / c) ** -e,
    )


def test_a_saturating_model_finds_what_was_planted_and_holds_on_the_other_task() -> None:
    of = planted(e=0.4, c=2.0)
    c, e = models.saturation(of.statistics["drag"], np.log(of.efficiencies))
    assert c == pytest.approx(2.0, rel=0.2)
    assert e == pytest.approx(0.4, rel=0.1)
    for model in (models.saturating("drag"), models.saturating_by_family("drag")):
        assert models.error_within(model, of) < 0.02
        assert models.error_across(model, of) < 0.03
    assert models.error_across(models.unity, of) > 0.5
    assert models.error_across(models.constant, of) > 0.4


def test_families_get_exponents_of_their_own_and_strangers_that_of_all() -> None:
    gains = np.array([0.5, 0.1, 0.5, 0.1])
    of = Points(
        ("t",) * 4, ("a", "a", "b", "b"), {"gain": gains}, gains ** np.array([0.2, 0.2, 0.6, 0.6])
    )
    by_drag = Points(of.tasks, of.families, {"drag": 1 / gains - 1}, of.efficiencies)
    assert models.error_within(models.saturating_by_family("drag"), by_drag) < 0.05
    model = models.power_by_family()(of)
    assert model(of) == pytest.approx(np.log(of.efficiencies))
    stranger = Points(("t",), ("c",), {"gain": np.array([0.1])}, np.array([1.0]))
    assert model(stranger) == pytest.approx(0.4 * np.log([0.1]))


# --- statistics of a training ---------------------------------------------------------------------


def watched(option: Any, steps: int = 60, noise: float = 1.0) -> dict[str, float]:
    """Statistics of gradients with a common part of norm 8 and own parts of norm 32 noise."""
    draw = torch.Generator().manual_seed(1)
    common = torch.randn(1024, generator=draw) / 4
    watch, residuals = Watch(), None
    for step in range(steps):
        grads = [common + noise * torch.randn(1024, generator=draw) for _ in range(RANKS)]
        done = virtual_step(option, grads, residuals, step=step)
        watch.see(step, grads, residuals, done)
        residuals = done.residuals
    return watch.summary()


def test_dense_steps_lose_nothing() -> None:
    found = watched(BASELINE.option)
    assert [found["gain"], found["burst"]] == pytest.approx([1.0, 1.0], abs=1e-5)
    lost = [v for k, v in found.items() if k not in ("gain", "burst", "snr")]
    assert lost == pytest.approx([0.0] * len(lost), abs=1e-5)


def test_statistics_are_what_they_are_called() -> None:
    found = watched(named("topk 0.1").option)
    assert found["snr"] == pytest.approx(1 / 16, rel=0.2)
    # 1 - gain of it stays behind; independent gradients add up to 1 / gain - 1 of their energy.
    noisy = watched(named("topk 0.1").option, noise=4.0, steps=120)
    assert noisy["residual"] == pytest.approx(1 / noisy["gain"] - 1, rel=0.1)
    # What only comes late is a smaller error of a longer path.
    assert found["error"] > found["error 10"] > found["error 30"] > 0
    assert found["noise 10"] < found["noise"]
    assert 0 < found["turn 30"] < found["turn"] < 1
    assert found["peak"] >= found["residual"]


def test_an_error_in_units_of_sampling_noise() -> None:
    """With S of N ranks left out at random the noise grows by S / (N - S)."""
    found = watched(named("skip 2 of 4, divisor drop").option, steps=200, noise=4.0)
    assert found["noise"] == pytest.approx(1.0, rel=0.1)
    assert found["residual"] == 0.0


def test_too_short_a_training_has_no_statistics_and_numbers_stay_finite() -> None:
    assert watched(BASELINE.option, steps=30) == {}
    watch = Watch()
    huge = [torch.full((8,), 3e38) for _ in range(RANKS)]
    done = virtual_step(BASELINE.option, huge)
    broken = VirtualStep(done.estimates, [g * torch.inf for g in huge], done.wire, done.memories)
    watch.see(0, huge, None, broken)
    assert all(math.isfinite(x) for x in watch.residuals(10) + watch.norms(10))


# --- trainings ------------------------------------------------------------------------------------


def test_a_training_learns_and_is_repeated_exactly() -> None:
    run = train(tiny(), BASELINE.option, 0.05, seed=3, steps=60)
    assert run == train(tiny(), BASELINE.option, 0.05, seed=3, steps=60)
    assert len(run.test) == 60 // EVERY
    assert run.test[-1] < 0.5 * run.start
    assert run.accuracy > 0.9
    assert not run.diverged
    assert max(run.residuals) == 0.0


def test_a_hopeless_training_is_given_up() -> None:
    run = train(tiny(), named("randomk feedback 0.01").option, 20.0, seed=0, steps=200)
    assert run.diverged
    assert len(run.residuals) < 200 // EVERY
    assert sweep.score(run) == math.inf


def test_memories_of_compressors_are_kept() -> None:
    """PowerSGD's half step alternates only if it remembers."""
    option = named("powersgd half rank 1").option
    run = train(tiny(), option, 0.05, seed=0, steps=60)
    assert run.test[-1] < run.start


def test_parts_of_the_data_do_not_overlap() -> None:
    parts = [tasks.windows(torch.arange(100)[part]) for part in (slice(40), slice(40, 100))]
    used = [set(torch.cat([p.x.flatten(), p.y]).tolist()) for p in parts]
    assert used == [set(range(40)), set(range(40, 100))]
    assert torch.equal(parts[1].x[:, -1] + 1, parts[1].y)
    text, images = tasks.text(), tasks.images()
    assert len(text.train.y) > 100_000
    numbered = tasks.Samples(torch.arange(90), torch.arange(90))
    kept, held = tasks.apart(numbered)
    assert (len(kept.y), len(held.y)) == (60, 30)
    assert sorted(torch.cat([kept.x, held.x]).tolist()) == list(range(90))
    for task in (text, images):
        model = task.model()
        assert model(task.test.x[:3]).shape == (3, task.classes)
        numbers = next(task.batches(RANKS, 5))
        assert numbers.shape == (RANKS, task.batch)
        assert torch.equal(numbers, next(task.batches(RANKS, 5)))


def test_every_compressor_that_loses_something_is_compared() -> None:
    compared = {method.option.compressor for method in METHODS}
    assert compared >= {name for name in COMPRESSORS if name not in EVERYTHING_ARRIVES}
    assert len({method.name for method in METHODS}) == len(METHODS)
    for method in METHODS:
        compile_option(method.option, RANKS)
    for name in STRESSED:
        assert named(name).feedback
    assert not named("skip 1 of 4, divisor drop").feedback
    assert not named("randomk unbiased 0.3").feedback
    assert named("skip 1 of 4, feedback").waits
    assert named("topk 0.1").waits
    assert not named("thc 4 bits").waits


# --- the sweep ------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [-3, -1, 0, 1, 4, 7, -9])
def test_a_search_goes_downhill_to_the_best_rate(best: int) -> None:
    tried = []

    def evaluate(rate: float) -> float:
        tried.append(rate)
        return abs(math.log2(rate / 0.1) - best)

    found = sweep.search(evaluate, 0.1)
    assert math.log2(found / 0.1) == pytest.approx(max(-4, min(4, best)))
    assert len(tried) == len(set(tried))


def test_a_search_leaves_rates_that_diverge() -> None:
    assert sweep.search(lambda r: math.inf if r > 0.03 else -r, 0.1) == pytest.approx(0.025)
    assert sweep.search(lambda r: math.inf, 0.16) == pytest.approx(0.01)


def small() -> sweep.Plan:
    methods = tuple(map(named, ("topk 0.1", "skip 2 of 4, divisor drop")))
    return sweep.Plan(60, (0, 1), methods, stressed=("topk 0.1",), as_is=1)


def test_what_was_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plan = tmp_path / "work" / "runs.jsonl", small()
    archive = sweep.Archive(path, plan.steps)
    before = list(sweep.sweep(archive, [tiny()], plan))
    assert {(d.method, d.seed) for d in before} >= {
        (m.name, s) for m in (BASELINE, *plan.methods) for s in plan.seeds
    }

    def never(*_: object) -> Run:
        raise AssertionError("trained again")

    monkeypatch.setattr(sweep, "train", never)
    again = sweep.Archive(path, plan.steps)
    assert again.all == archive.all
    assert list(sweep.sweep(again, [tiny()], plan)) == before

    # The last line was interrupted.
    path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert sweep.Archive(path, plan.steps).all == archive.all[:-1]
    assert path.read_text(encoding="utf-8").endswith("\n")
    with pytest.raises(ValueError, match="other trainings"):
        sweep.Archive(path, plan.steps + 1)


# --- divergence -----------------------------------------------------------------------------------


def losing(
    method: str, rate: float, losses: list[float], residuals: list[float], norm: float = 1.0
) -> sweep.Done:
    norms = [norm] * len(residuals)
    gain = {"dense": 1.0, "topk 0.1": 0.1, "topk 0.01": 0.05, "topkc 0.01": 0.01}[method]
    statistics = {"gain": gain, "snr": 0.0, "noise 10": 1.0 / gain}
    run = Run(losses, losses, 2.0, 0.5, losses[-1] > 2.0, statistics, residuals, norms)
    return sweep.Done("text", method, rate, 0, run)


def test_only_what_compression_brought_about_is_counted() -> None:
    good, slow = [1.6, 1.2, 0.8, 0.4], [1.9, 1.8, 1.7, 1.6]
    done = [
        losing("dense", 0.1, good, [0.0] * 4, norm=2.0),
        losing("dense", 0.2, [1.0, 1.5, 2.1], [0.0] * 3),
        losing("topk 0.1", 0.1, good, [1.0, 2.0, 3.0, 2.0]),
        losing("topk 0.01", 0.1, slow, [1.0, 20.0, 3000.0, 20.0]),
        losing("topkc 0.01", 0.1, [1.9, 1.9, 9.0, 99.0], [5.0, 50.0, 500.0, 5000.0], norm=8.0),
        losing("topkc 0.01", 0.2, [1.0, 9.0, 99.0], [5.0, 50.0, 500.0]),
    ]
    matched = summary.lines(done, 0, 4 * EVERY)
    known = divergence.cases(done, matched, 0, 4 * EVERY)
    assert [(c.done.method, c.diverged, c.useful) for c in known] == [
        ("topk 0.1", False, True),
        ("topk 0.01", False, False),
        ("topkc 0.01", True, False),
    ]
    kept, _, lost = known
    assert divergence.peak(lost, divergence.residual) == 5000.0
    # The harm shows at the third evaluation.
    assert divergence.lead(lost, divergence.residual, at=10.0) == EVERY
    assert divergence.lead(lost, divergence.residual, at=1000.0) == -EVERY
    assert math.isnan(divergence.lead(kept, divergence.residual, at=10.0))
    assert divergence.gradient(lost) == [4.0] * 4
    found = {name: divergence.fit(known, q) for name, q in divergence.QUANTITIES.items()}
    assert 3.0 < found["residual over gradient"].at < 5000.0
    assert 0.5 < found["gradient over dense gradient"].at < 4.0
    assert 9.0 < found["drag of the option"].at < 99.0
    assert all(t.misses == 0.0 for t in found.values())
    assert all(math.isnan(x) for x in divergence.across(known, divergence.residual))
    twice = [*known, *(replace(c, done=replace(c.done, task="images")) for c in known)]
    assert divergence.across(twice, divergence.residual) == (0.0, 0.0)
    assert divergence.safe_gain(known) == (0.01, 2)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def tiny_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        efficiency, "TASKS", {name: lambda name=name: tiny(name) for name in ("images", "text")}
    )


def test_a_quick_run_goes_through_everything_and_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_tasks: None
) -> None:
    path = tmp_path / "efficiency.json"
    assert efficiency.main(["--quick", "--work", str(tmp_path / "w")], path) == 0
    shown = capsys.readouterr().out
    assert "rank correlation" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_whole_run_writes_a_well_formed_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_tasks: None
) -> None:
    path = tmp_path / "efficiency.json"
    arguments = ["--work", str(tmp_path / "runs.jsonl"), "--output", "json"]
    assert efficiency.main(arguments, path, small()) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out) == document
    assert results_file.check(document) == []
    of = [r for r in document["rows"] if r["kind"] == "method" and r["rates"] == "matched"]
    assert {(r["task"], r["method"]) for r in of} == {
        (task, method.name) for task in ("images", "text") for method in small().methods
    }
    assert all(len(r["efficiency by seed"]) == 2 for r in of)
    kept = next(r for r in of if r["method"] == "topk 0.1")
    assert kept["delay"] == pytest.approx(1 / kept["gain"] - 1, rel=0.01)
    assert kept["drag"] >= kept["delay"] > 0


def test_work_of_another_kind_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_tasks: None
) -> None:
    sweep.Archive(tmp_path / "runs.jsonl", 7)
    with pytest.raises(SystemExit):
        efficiency.main(["--work", str(tmp_path / "runs.jsonl")], None, small())
    assert "other trainings" in capsys.readouterr().err


def test_the_committed_file_has_every_method_on_both_tasks_with_all_seeds() -> None:
    document = json.loads((results_file.RESULTS / "efficiency.json").read_text(encoding="utf-8"))
    of = {
        (r["task"], r["method"]): r
        for r in document["rows"]
        if r["kind"] == "method" and r["rates"] == "matched"
    }
    assert set(of) == {(task, m.name) for task in ("images", "text") for m in METHODS}
    assert document["seeds"] == list(sweep.Plan().seeds)
    for row in of.values():
        assert len(row["efficiency by seed"]) == len(document["seeds"])
        assert row["efficiency"] == pytest.approx(np.median(row["efficiency by seed"]), rel=1e-3)
    assert document["verdicts"] == report.verdicts(document["rows"])


def test_the_rate_that_was_repeated_is_the_one_that_counts() -> None:
    good, better = [3.0, 2.0, 1.0], [2.5, 1.5, 0.5]

    def done(method: str, rate: float, seed: int, losses: list[float]) -> sweep.Done:
        run = Run(losses, losses, 4.0, 0.5, False, {"gain": 0.5, "snr": 0.25}, [1.0], [1.0])
        return sweep.Done("text", method, rate, seed, run)

    of = [
        done("dense", 0.1, 0, good),
        done("dense", 0.1, 1, good),
        done("topk 0.1", 0.1, 0, good),
        done("topk 0.1", 0.1, 1, good),
        done("topk 0.1", 0.4, 0, better),
    ]
    assert summary.lines(of, 0, 30, matched=False) == summary.lines(of, 0, 30)
    (line,) = summary.lines(of, 0, 30)
    assert line.rate == 0.1
    assert line.efficiency == pytest.approx(1.0)
    assert line.statistic("delay") == 1.0
    assert line.statistic("drag") == 1.0 + RANKS * 0.25


def test_gain_is_what_policies_mean_by_it() -> None:
    def line(method: str) -> summary.Line:
        run = Run([1.0], [1.0], 2.0, 0.5, False, {"gain": 1.0}, [0.0], [1.0])
        return summary.Line("text", named(method), 0.1, (0.1,), {0: run}, {0: 1.0}, {0: 1.0}, 2)

    assert line("thc 4 bits").statistic("gain") == 1.0
    assert line("thc 4 bits").statistic("drag") == 0.0
    unbiased = line("randomk unbiased 0.1")
    assert unbiased.statistic("gain") == 0.1
    # The same elements of every rank: the noise is that of the mean itself, nothing waits.
    assert unbiased.statistic("drag") == pytest.approx(9.0 * (1 + 2 * RANKS))
    assert math.isnan(unbiased.statistic("error"))

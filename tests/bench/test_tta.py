"""The benchmark of time to accuracy: what needs neither root nor a network."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.netlab import Link
from bench.tta import checks, estimate, matrix, oracle
from bench.tta.__main__ import main
from bench.tta.hosts import RowFailedError
from bench.tta.matrix import Row
from bench.tta.methods import METHODS
from bench.tta.networks import NETWORKS, Phase, change_to
from bench.tta.store import BusyError, Store
from bench.tta.tasks import TASKS, evaluations, loss_of
from gradpilot.protos.messages import DENSE
from gradpilot.worker_agent.compressors.base import create
from tests.bench.tta_rows import finished

# --- matrix --------------------------------------------------------------------------------------


def test_a_pattern_chooses_rows_and_names_what_it_does_not_know() -> None:
    found = matrix.rows("all", "cnn/c1,fast/bf16,top*/0", steps=60)
    assert [row.id for row in found] == [
        "cnn/fast/bf16/0",
        "cnn/fast/topk/0",
        "cnn/fast/topkc/0",
        "cnn/c1/bf16/0",
        "cnn/c1/topk/0",
        "cnn/c1/topkc/0",
    ]
    assert {row.steps for row in found} == {60}
    with pytest.raises(ValueError, match="no network fits 'c3'; there are 1000mbit"):
        matrix.rows("all", "cnn/c3")
    with pytest.raises(ValueError, match="task/network/method/seed"):
        matrix.rows("all", "cnn/c1/bf16/0/0")
    with pytest.raises(ValueError, match="no row of matrix 'quick' fits"):
        matrix.rows("quick", "mlp")


@pytest.mark.parametrize("name", list(matrix.MATRICES))
def test_rows_that_are_compared_run_together_and_the_oracle_last(name: str) -> None:
    found = matrix.rows(name)
    assert len({row.file for row in found}) == len(found)
    blocks = [row.block for row in found]
    changes = sum(a != b for a, b in pairwise(blocks))
    if name != "rest":  # whose two parts share blocks
        assert changes + 1 == len(set(blocks))
    for rows in matrix.blocks(found).values():
        names = [row.method for row in rows]
        if "oracle" in names and name != "rest":
            assert names[-1] == "oracle"


def test_each_seed_begins_with_another_method() -> None:
    firsts = {
        seed: next(row.method for row in matrix.rows("required", f"cnn/c1/*/{seed}"))
        for seed in range(3)
    }
    assert len(set(firsts.values())) == 3


def test_whatever_was_made_of_the_required_rows_is_a_result() -> None:
    found = matrix.rows("required")
    assert {row.method for row in found} >= {"fp32", "bf16", "powersgd", "topk", "topkc", "skip"}
    assert {row.seed for row in found if row.network == "c2"} == {0, 1, 2}
    assert {row.seed for row in found if row.network == "fast"} == {0, 1}
    blocks = list(matrix.blocks(found))
    assert {(task, network) for task, network, _ in blocks[:4]} == {
        (task, network) for task in ("cnn", "transformer") for network in ("c1", "100mbit-5ms")
    }
    one_seed = [(task, network) for task, network, seed in blocks if seed == 1]
    assert [(task, network) for task, network, _ in blocks[: len(one_seed)]] == one_seed


def test_the_time_of_rows_is_foretold_by_such_rows_or_by_what_they_send(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (row,) = matrix.rows("all", "mlp/c2/topk/0", steps=200)
    slow, fast = (
        matrix.rows("all", f"mlp/{name}/fp32/0", steps=200)[0] for name in ("50mbit-20ms", "fast")
    )
    assert estimate.step_seconds(slow) > 10 * estimate.step_seconds(fast)
    # 2.4 M parameters, 1.5 times to the wire, at 50 Mbit/s.
    assert estimate.step_seconds(slow) == pytest.approx(2.4e6 * 4 * 1.5 * 8 / 50e6, rel=0.1)
    measured = finished("topk", 0.5, network="c2", wall_seconds=60.0)
    store.save(row, {**measured, "task": "mlp"})
    known = estimate.known(store)
    assert estimate.seconds(row, known) == pytest.approx(200 * 0.5 + 10.0)
    oracles = matrix.rows("all", "mlp/c2/oracle", steps=200)
    first, *others = estimate.total(oracles, known, options=3)
    sweep = estimate.sweep_seconds(oracles[0], 3)
    assert [first - sweep] * 2 == pytest.approx(others)


def test_the_list_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(tmp_path)
    (row,) = matrix.rows("quick", "cnn/c1/topk")
    store.save(row, finished("topk"))
    arguments = ["--list", "--quick", "--output", "json", "--folder", str(tmp_path)]
    assert main(arguments) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == 6
    assert [one["row"] for one in listed if one["finished"]] == ["cnn/c1/topk/1"]
    assert listed[0]["estimated_seconds"] > 0
    assert main([*arguments[:2], "--folder", str(tmp_path)]) == 0
    assert re.search(r"6 rows, 5 to do, about \d\.\d hours", capsys.readouterr().out)
    assert main(["--list", "--rows", "cnn/nowhere"]) == 2
    assert "no network fits" in capsys.readouterr().err


def test_where_no_lab_can_be_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.tta.__main__.missing", lambda: ["root"])
    assert main(["--quick", "--folder", str(tmp_path)]) == 2
    assert "needs emulated hosts, and root" in capsys.readouterr().err


def test_a_row_that_fails_is_told_and_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.tta.__main__.missing", lambda: [])
    kept, broken = matrix.rows("quick", "cnn/c1/topk,bf16")

    def run(row: Row, *_: object) -> dict[str, Any]:
        if row == broken:
            raise RowFailedError("rank 1 ended with 1; rank1: out of memory")
        return finished(row.method)

    monkeypatch.setattr("bench.tta.rows.run", run)
    wanted = ["--quick", "--rows", "cnn/c1/topk,bf16", "--folder", str(tmp_path)]
    assert main(wanted) == 1
    said = capsys.readouterr()
    assert f"[1/2] {kept.id}: 10.0 s of training (100 ms a step)" in said.err
    assert f"[2/2] {broken.id}: FAILED" in said.err
    assert "out of memory" in said.err
    assert [row["method"] for row in Store(tmp_path).every()] == [kept.method]
    # The next time only what failed is made.
    monkeypatch.setattr("bench.tta.rows.run", lambda row, *_: finished(row.method))
    assert main(wanted) == 0
    said = capsys.readouterr()
    assert f"[1/2] {kept.id}: finished before" in said.err
    assert "holds  ranks in sync" in said.out
    assert main([*wanted, "--report"]) == 0


# --- networks ------------------------------------------------------------------------------------


def test_schedules_are_scaled_as_stated() -> None:
    c1, c2 = NETWORKS["c1"], NETWORKS["c2"]
    assert [p.link for p in c1.phases] == [
        Link(rate_mbit=1000, rtt_ms=0.4),
        Link(rate_mbit=40, rtt_ms=0.4),
        Link(rate_mbit=40, rtt_ms=20),
        Link(rate_mbit=1000, rtt_ms=20),
    ]
    assert c1.period == pytest.approx(80)
    assert len(c2.phases) == 11
    assert c2.phases[5].link == Link(rate_mbit=40, rtt_ms=12.8)
    assert c2.phases[5].seconds == 2 * c2.phases[0].seconds


@pytest.mark.parametrize("name", list(NETWORKS))
def test_a_network_can_be_replayed_and_its_seeds_differ(name: str) -> None:
    network = NETWORKS[name]
    trace = network.trace(4)
    assert (trace is not None) == network.changing
    assert len(network.links(4)) == 4
    if trace is None:
        assert network.turned(1) == network
        assert network.beginnings(1e6) == [(0.0, network.phases[0])]
        return
    trace.check(4)
    assert trace.seconds < network.period
    turns = [network.turned(seed) for seed in range(3)]
    assert len({turn.phases for turn in turns}) == 3
    assert all(turn.period == pytest.approx(network.period) for turn in turns)


@given(seconds=st.floats(0, 500))
@settings(deadline=None, max_examples=40)
def test_phases_by_time_and_by_list_agree(seconds: float) -> None:
    network = NETWORKS["c2"].turned(1)
    begun = [phase for at, phase in network.beginnings(600) if at <= seconds]
    exact = any(abs(at - seconds) < 1e-6 for at, _ in network.beginnings(600))
    assert exact or network.at(seconds).state == begun[-1].state


def test_other_traffic_comes_and_goes() -> None:
    quiet = Phase(5.0, Link(rate_mbit=500, rtt_ms=1))
    changes = change_to(quiet, 3.0, 5, busy=True)
    assert [c.flow for c in changes] == [None, (0, 1), (2, 3)]
    assert [c.rate_mbit for c in changes] == [500, 0, 0]
    assert all(c.seconds == 3.0 for c in changes)


def test_the_slow_host_is_slow_by_itself_and_the_slow_link_by_its_link() -> None:
    assert NETWORKS["slow-host"].last_seconds > 0
    assert len(set(NETWORKS["slow-host"].links(4))) == 1
    assert NETWORKS["slow-link"].links(4)[-1].rate_mbit == 100


# --- methods and tasks ---------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_static_method_is_an_option_that_can_be_carried_out(ranks: int) -> None:
    for name, option in oracle.candidates(ranks).items():
        assert METHODS[name].equals(ranks) == option
        create(option)
    assert METHODS["skip"].start(ranks).skip == ranks // 2
    assert METHODS["adaptive"].start(ranks) == DENSE
    assert METHODS["oracle"].equals(ranks) is None


def test_the_learning_rate_is_constant_where_targets_are_reached() -> None:
    task = TASKS["cnn"]
    rates = [task.learning_rate(step, 600) for step in range(600)]
    assert rates[0] == pytest.approx(task.rate / 20)
    assert set(rates[20:360]) == {task.rate}
    assert rates[-1] == pytest.approx(task.rate / 240)
    assert all(a > b for a, b in pairwise(rates[361:]))


def test_ranks_share_the_batches_of_a_step_and_seeds_differ() -> None:
    task = TASKS["transformer"]
    one, other = (next(task.batches(0, rank, 2))[0] for rank in (0, 1))
    assert not torch.equal(one, other)
    assert torch.equal(one, next(task.batches(0, 0, 2))[0])
    assert not torch.equal(one, next(task.batches(1, 0, 2))[0])
    x, y = next(task.batches(0, 0, 2))
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_what_is_learned_of_the_text_shows_in_the_rest_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bench.tta.tasks.TEST_WINDOWS", 40)
    before_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task = TASKS["transformer"]
    model = task.model(0)
    before = task.evaluate(model)
    assert before == pytest.approx(math.log(256), rel=0.1)
    optimizer = task.optimizer(model, task.rate)
    for _, (x, y) in zip(range(8), task.batches(0, 0, 1), strict=False):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = task.evaluate(model)
    torch.set_num_threads(before_threads)
    assert after < 0.85 * before


@given(steps=st.integers(1, 3000))
@settings(deadline=None, max_examples=40)
def test_evaluations_are_spread_and_end_with_the_last_step(steps: int) -> None:
    found = evaluations(steps)
    assert found[-1] == steps - 1
    assert len(found) <= 31
    assert list(found) == sorted(set(found))
    assert all(0 <= step < steps for step in checks.sampled(steps))


# --- store ---------------------------------------------------------------------------------------


def test_a_finished_row_is_kept_and_half_a_row_is_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    row = Row("cnn", "c1", "bf16", 0, 4, 100)
    assert store.load(row) is None
    store.save(row, finished())
    assert store.load(row) == finished()
    assert store.every() == [finished()]
    (tmp_path / row.file).write_text('{"task": "cn')
    assert store.load(row) is None
    (tmp_path / row.file).write_text('{"task": "cnn"}')
    assert store.load(row) is None
    assert store.finished([row]) == []
    with store.alone(), pytest.raises(BusyError), Store(tmp_path).alone():
        pass

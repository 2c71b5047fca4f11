from __future__ import annotations

import json
import shutil
import sqlite3
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gradpilot import cli
from gradpilot.controller.server import Controller
from gradpilot.controller.store import Store, StoredRun
from gradpilot.errors import ConfigError
from gradpilot.policies.base import Inputs
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import BF16, Decision
from gradpilot.simulate.replay import find, load, replay
from tests.controller import fakes
from tests.controller.fakes import agents, until

SLOW = fakes.Link(alpha=1e-3, beta=8e-8)  # 100 Mbit/s


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the state file of a controller, its solver a process, that decided about a run."""
    path = tmp_path_factory.mktemp("recorded") / "state.sqlite3"
    config = fakes.config(state=str(path), policy="adaptive", min_decision_seconds=0.0)
    async with Controller(config) as controller, agents(controller) as ranks:
        run = await until(lambda: controller.runs.get("run", "model"))
        for number in range(1, 5):
            for rank in ranks:
                await rank.report(rank.newest_plan(), link=SLOW)

            def decided(number: int = number) -> bool:
                return bool(sum(run.decisions.outcomes.values()) >= number)

            await until(decided, 30.0)
        await controller.planner.pin(run, BF16)
    return path


@pytest.fixture
def state(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(recorded, tmp_path / "state.sqlite3"))


def run(
    capsys: pytest.CaptureFixture[str], state: Path, *arguments: str, run_id: str = "run"
) -> tuple[int, str, str]:
    code = cli.main(["replay", run_id, "--state", str(state), *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def as_json(capsys: pytest.CaptureFixture[str], state: Path, *arguments: str) -> dict[str, Any]:
    _, out, err = run(capsys, state, *arguments, "--output", "json")
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def test_every_decision_comes_out_equal_bit_for_bit(
    capsys: pytest.CaptureFixture[str], state: Path
) -> None:
    outcomes = []
    for number in range(1, 5):
        code, out, err = run(capsys, state, "--decision", str(number))
        assert (code, err) == (0, "")
        assert out.endswith("equal bit for bit\n")
        outcomes.append(as_json(capsys, state, "--decision", str(number))["stored"]["outcome"])
    assert "switch" in outcomes
    assert "keep" in outcomes


def test_another_policy_may_be_asked(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    found = as_json(capsys, state, "--decision", "1", "--policy", "fixed")
    assert found["stored"]["policy"] == "adaptive"
    assert found["replayed"]["policy"] == "fixed"
    assert not found["equal"]
    assert "reason" in found["differences"]
    code, out, _ = run(capsys, state, "--decision", "1", "--policy", "fixed")
    assert code == 0  # another answer is what was asked for
    assert "now, fixed: " in out


def test_a_difference_is_found_and_named(state: Path) -> None:
    stored = load(state, "run", "", 1)
    assert replay(stored).differences == ()
    assert stored.chosen is not None
    assert stored.link is not None
    inputs = from_json(Inputs, stored.inputs_json)
    one_bit = replace(stored.chosen, step_seconds=stored.chosen.step_seconds * (1 + 2**-52))
    slower = replace(inputs, compute_seconds=2 * inputs.compute_seconds)
    for changed, names in (
        (replace(stored, chosen=one_bit), {"chosen"}),
        (replace(stored, reason="because"), {"reason"}),
        (replace(stored, plan=None), {"options"}),
        (replace(stored, outcome="keep"), {"outcome"}),
        (replace(stored, link=replace(stored.link, samples=0)), {"link"}),
        (replace(stored, inputs_json=to_json(slower)), {"chosen", "front", "reason"}),
    ):
        assert names <= set(replay(changed).differences)


def test_a_difference_fails_the_command(capsys: pytest.CaptureFixture[str], state: Path) -> None:
    stored = load(state, "run", "", 1)
    change(state, replace(stored, reason="because"))
    code, out, _ = run(capsys, state, "--decision", "1")
    assert code == 1
    assert out.endswith("different: reason\n")


def change(state: Path, decision: Decision) -> None:
    body = zlib.compress(to_json(decision).encode())
    with sqlite3.connect(state) as connection:
        connection.execute("UPDATE decisions SET body = ? WHERE id = ?", (body, decision.id))
    connection.close()


def test_reading_changes_nothing(state: Path) -> None:
    before = state.read_bytes()
    load(state, "run", "model", -1)
    assert state.read_bytes() == before
    assert sorted(p.name for p in state.parent.iterdir()) == [state.name]


def test_orders_cannot_be_decided_again(state: Path) -> None:
    newest = load(state, "run", "model", -1)
    assert newest.outcome == "pinned"
    with pytest.raises(ConfigError, match="is pinned: it was not taken from measurements"):
        replay(newest)


@pytest.mark.parametrize(
    ("run_id", "arguments", "message"),
    [
        ("other", (), "has no run 'other'; it has: 'run'"),
        ("run", ("--model", "gan"), "model 'gan' has no decision"),
        ("run", ("--decision", "99"), "has no decision 99"),
        ("run", ("--policy", "nothing"), "unknown policy 'nothing'"),
    ],
)
def test_what_is_not_there_is_one_clear_line(
    capsys: pytest.CaptureFixture[str],
    state: Path,
    run_id: str,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    code, out, err = run(capsys, state, *arguments, run_id=run_id)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_or_foreign_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, tmp_path / "missing.sqlite3")
    assert code == 2
    assert "there is no state file" in err
    path = tmp_path / "text.sqlite3"
    path.write_text("no database " * 500)
    code, _, err = run(capsys, path)
    assert code == 1
    assert "not a database" in err
    assert err.count("\n") == 1


@pytest.mark.asyncio(loop_scope="session")
async def test_a_run_with_two_models_needs_a_name(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "two.sqlite3"))
    await store.open()
    for model in ("generator", "critic"):
        await store.save_run(StoredRun("gan", model))
    with pytest.raises(ConfigError, match=r"has models .*; --model names one"):
        await find(store, "gan", "", -1)
    await store.close()

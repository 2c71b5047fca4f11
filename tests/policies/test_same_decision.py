"""Same inputs and seed, same decision: in one process, in others, and from what was stored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradpilot.policies.base import POLICIES, Inputs
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import DENSE
from tests.policies import scenario
from tests.policies.test_trial import Job, crawling

PROGRAM = """
import pathlib, sys
from gradpilot.policies.base import POLICIES, Inputs
from gradpilot.protos.jsoncodec import from_json, to_json
for path in sys.argv[1:]:
    inputs = from_json(Inputs, pathlib.Path(path).read_text())
    print(to_json(POLICIES.get("adaptive")().decide(inputs)))
"""


def undone() -> Inputs:
    """A job in which plans were tried, undone and banned."""
    job = Job(crawling)
    job.run(25)
    assert job.base.history.bans
    return job.base


def several() -> dict[str, Inputs]:
    groups = scenario.settings(per_bucket=True, solver_seconds=60.0)
    sizes = (1_000_000, 40_000, 1_000_000, 300)
    return {
        "uniform": scenario.inputs(mbit=50, current=DENSE),
        "groups": scenario.inputs(mbit=100, sizes=sizes, settings=groups),
        "probe": scenario.inputs(
            operations=scenario.operations(1e-3, 8e-8, 8, sizes=(1 << 20,), repeats=20)
        ),
        "nothing": scenario.inputs(operations=()),
        "undone": undone(),
    }


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What two other processes with other hash seeds decide about the stored inputs, as text."""
    folder = tmp_path_factory.mktemp("inputs")
    for name, inputs in several().items():
        (folder / f"{name}.json").write_text(to_json(inputs))
    paths = [str(folder / f"{name}.json") for name in several()]
    return [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *paths], capture_output=True, text=True, check=True,
            timeout=50, env={"PYTHONHASHSEED": seed}, cwd=Path(__file__).resolve().parents[2],
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]  # fmt: skip


def test_other_processes_decide_the_same(others: list[list[str]]) -> None:
    own = [to_json(POLICIES.get("adaptive")().decide(inputs)) for inputs in several().values()]
    assert len({*own}) == len(own)
    for texts in others:
        assert texts == own


def test_what_was_stored_is_what_was_asked() -> None:
    for inputs in several().values():
        assert to_json(from_json(Inputs, to_json(inputs))) == to_json(inputs)

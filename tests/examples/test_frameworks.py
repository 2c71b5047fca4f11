"""The examples with frameworks: managed, in sync, and resumed from the framework's own checkpoint.

All run in one job, under ``gradpilot.auto``: what the frameworks' integrations attach is left to
them, and a model that nobody attaches is managed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gradpilot.auto.__main__ import path
from tests.conftest import require_tool
from tests.examples import drive
from tests.project import ROOT
from tests.ranks import free_port
from tests.torchrun import Ended, torchrun

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

PACKAGES = {"lightning": "lightning", "accelerate": "accelerate", "hf_trainer": "transformers"}
each_framework = pytest.mark.parametrize("name", PACKAGES)
STEPS_AN_EPOCH = 1437 // 2 // 16
"""Images, ranks, images in a batch."""
TOPK = '{"compressor": "topk", "ratio": 0.05, "collective": "allgather"}'


@functools.cache
def installed(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES[name]) is not None


@contextlib.contextmanager
def controller(folder: Path) -> Iterator[str]:
    """Run a controller that gives every model one option; yield its address."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        *(sys.executable, "-m", "gradpilot.controller", "--grpc-address", address),
        *("--http-address", "127.0.0.1:0", "--state", ":memory:", "--report-seconds", "0.2"),
        *("--policy", "fixed", "--policy-settings.fixed", TOPK),
    ]
    with (folder / "controller.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.terminate()
        assert process.wait(10) == 0


@dataclass(frozen=True)
class Job:
    """What became of the job, and what its ranks saw."""

    ended: Ended
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Run all examples whose frameworks are there."""
    folder = tmp_path_factory.mktemp("frameworks")
    names = [name for name in PACKAGES if installed(name)]
    with controller(folder) as address:
        ended = torchrun(
            folder,
            *(str(Path(drive.__file__)), str(folder), *names),
            ranks=2,
            timeout=100,
            PYTHONPATH=path(str(ROOT)),
            GRADPILOT_CONTROLLER=address,
            HF_HUB_OFFLINE="1",
        )
    assert ended.code == 0, ended.err
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return Job(ended, ranks)


def trainings(job: Job, name: str, which: str) -> list[dict[str, Any]]:
    """Return what each rank saw of a training."""
    require_tool(functools.partial(installed, name), f"pip install {PACKAGES[name]}")
    for rank in job.ranks:
        assert "error" not in rank[name], rank[name]["error"]
    return [rank[name][which] for rank in job.ranks]


@each_framework
def test_the_framework_trains_under_a_plan_of_the_controllers(job: Job, name: str) -> None:
    for found in trainings(job, name, "first"):
        assert found["controller"] != ""
        assert found["steps"] == drive.EPOCHS * STEPS_AN_EPOCH
        assert found["switches"] == 1, "its plan came into force"
        assert found["sent"] < 1, "and was carried out"
        assert found["equal"], "ranks are in sync"
        assert (found["frozen"], found["resets"], found["reports dropped"]) == ("", 0, 0)
        assert found["accuracy"] > 0.75


@each_framework
def test_it_goes_on_from_the_frameworks_checkpoint(job: Job, name: str) -> None:
    """Without a controller the strong compression can only be of the plan in the checkpoint."""
    for found in trainings(job, name, "second"):
        assert found["controller"] == ""
        assert found["steps"] == (drive.EPOCHS + 1) * STEPS_AN_EPOCH
        assert found["sent"] < 0.2, "the plan went on with the first step"
        assert found["equal"], "ranks are in sync"
        assert (found["frozen"], found["resets"]) == ("", 0)
        assert found["accuracy"] > 0.75


def test_auto_manages_what_nobody_attached_and_leaves_the_rest_alone(job: Job) -> None:
    for rank in job.ranks:
        assert rank["plain model"] == "0 Pipeline"
    assert "stays plain DDP" not in job.ended.err
    assert job.ended.left == ()


# --- gradpilot.auto ------------------------------------------------------------------------------


def python(folder: Path, code: str, **env: str) -> str:
    """Return what an interpreter prints that has both this folder and ours on its path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path(str(folder)), **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_auto_does_nothing_outside_a_rank_and_hides_no_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other one')")
    code = (
        "import sys; print(type(sys.meta_path[0]).__name__ == '_Finder',"
        " sorted({'torch', 'gradpilot', 'grpc'} & set(sys.modules)))"
    )
    assert python(tmp_path, code).splitlines() == ["the other one", "False []"]
    found = python(tmp_path, code, RANK="0", WORLD_SIZE="2")
    assert found.splitlines() == ["the other one", "True []"]


def test_auto_is_put_first_on_the_path_once() -> None:
    folder, _, rest = path("a:b").partition(":")
    assert (Path(folder), rest) == (ROOT / "gradpilot" / "auto", "a:b")
    assert path(path("a:b")) == path("a:b")
    assert path("") == folder

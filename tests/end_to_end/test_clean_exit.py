"""A job ends as its script ended: with its exit code, soon, and with nothing left behind.

Exits race with threads, so each kind is repeated: ``GRADPILOT_EXIT_REPEATS`` times, 2 by default.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from tests.torchrun import WRAPPER, Ended, torchrun

REPEATS = int(os.environ.get("GRADPILOT_EXIT_REPEATS", "2"))

LIMIT_SECONDS = 45.0
"""For a job whose ranks train for a second or two, on a busy machine."""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_SECONDS + 15)]

TRAIN = """
import gc, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(steps=30):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.01)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(8, 64)).square().sum().backward()
    return ddp

dist.init_process_group("gloo")
rank = dist.get_rank()
"""

TIDY = """
ddp = train()
del ddp
gc.collect()
dist.destroy_process_group()
"""

UNTIDY = """
ddp = train()
"""

IDLE = """
import time
time.sleep(5)  # a controller that has just been started may be too busy to end in good order
"""

RAISES = """
ddp = train()
raise ValueError("the script's own mistake")
"""

ONE_RANK_RAISES = """
if rank == 1:
    ddp = train(10)
    raise ValueError("the script's own mistake")
ddp = train(20)  # blocks at step 10 until torchrun ends it
"""

EXITS = """
ddp = train()
sys.exit(3)
"""


def run(folder: Path, script: str, **env: str) -> Ended:
    """Run a script under the wrapper on two ranks."""
    path = folder / "script.py"
    path.write_text(TRAIN + textwrap.dedent(script))
    return torchrun(folder, *WRAPPER, str(path), ranks=2, timeout=LIMIT_SECONDS, **env)


repeated = pytest.mark.parametrize("repetition", range(REPEATS))


@repeated
@pytest.mark.parametrize("script", [TIDY, UNTIDY], ids=["own tear-down", "no tear-down"])
def test_success_stays_success(tmp_path: Path, script: str, repetition: int) -> None:
    ended = run(tmp_path, script)
    assert ended.code == 0, ended.err
    assert ended.left == ()


def test_the_embedded_controller_is_told_to_end_and_cleans_up(tmp_path: Path) -> None:
    """Though the wrapper's caller keeps no handle."""
    ended = run(tmp_path, UNTIDY + IDLE)
    assert ended.code == 0, ended.err
    assert ended.folders == ()


@repeated
def test_a_compressing_job_ends_well(tmp_path: Path, repetition: int) -> None:
    """The communication thread is in use until the last step."""
    ended = run(tmp_path, UNTIDY, GRADPILOT_OPTION="topk ratio=0.1 collective=allgather")
    assert ended.code == 0, ended.err
    assert ended.left == ()


@repeated
def test_without_a_controller(tmp_path: Path, repetition: int) -> None:
    ended = run(tmp_path, UNTIDY, GRADPILOT_CONTROLLER="off")
    assert ended.code == 0, ended.err


@repeated
@pytest.mark.parametrize("script", [RAISES, ONE_RANK_RAISES], ids=["all ranks", "one rank"])
def test_an_exception_fails_the_job_and_is_shown(
    tmp_path: Path, script: str, repetition: int
) -> None:
    ended = run(tmp_path, script)
    assert ended.code != 0
    assert "ValueError: the script's own mistake" in ended.err
    assert ended.left == ()


@repeated
def test_the_exit_code_is_the_scripts(tmp_path: Path, repetition: int) -> None:
    ended = run(tmp_path, EXITS)
    assert ended.code != 0
    assert "exitcode  : 3" in ended.err
    assert ended.left == ()

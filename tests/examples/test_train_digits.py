"""The example trains, as it is and under the wrapper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.torchrun import WRAPPER, Ended, torchrun

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train_digits.py")

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def accuracy(ended: Ended) -> float:
    """Return what rank 0, and no other rank, printed."""
    assert ended.code == 0, ended.err
    (printed,) = re.findall(r"^accuracy ([01]\.\d{3})$", ended.out, re.MULTILINE)
    return float(printed)


def test_it_trains_without_gradpilot(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, SCRIPT, ranks=4, timeout=100)
    assert accuracy(ended) > 0.9
    assert "gradpilot" not in ended.err


def test_the_wrapper_manages_it(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, *WRAPPER, SCRIPT, ranks=4, timeout=100, GRADPILOT_LOG="info")
    assert accuracy(ended) > 0.9
    assert "gradpilot rank 0 INFO: connected to controller 127.0.0.1:" in ended.err
    assert "WARNING" not in ended.err
    assert ended.left == ()


def test_it_trains_under_strong_compression(tmp_path: Path) -> None:
    """Error feedback makes up for 19 of 20 elements that are not sent."""
    ended = torchrun(
        *(tmp_path, *WRAPPER, SCRIPT),
        ranks=4,
        timeout=100,
        GRADPILOT_LOG="info",
        GRADPILOT_OPTION="topk ratio=0.05 collective=allgather",
    )
    assert accuracy(ended) > 0.9

"""What all tests share: a clean environment, and one way to ask for a tool."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent

_ARITHMETIC = frozenset(
    ("policies", "protos", "simulate", "worker_agent/collectives", "worker_agent/compressors")
)
"""Folders of tests that only compute: they can run beside anything."""

_REQUIRE_ALL = os.environ.get("GRADPILOT_REQUIRE_ALL", "") == "1"


def require_tool(tool: str | Callable[[], object], reason: str) -> None:
    """Skip the test if a tool is missing, or fail it where ``GRADPILOT_REQUIRE_ALL=1``.

    Args:
        tool: Name of a program, or a function that answers whether the tool can be used.
        reason: How to get it, such as ``apt-get install prometheus``.
    """
    if shutil.which(tool) if isinstance(tool, str) else tool():
        return
    name = tool if isinstance(tool, str) else getattr(tool, "__name__", "a tool")
    message = f"{name} is missing: {reason}"
    if _REQUIRE_ALL:
        pytest.fail(f"{message} (GRADPILOT_REQUIRE_ALL=1)", pytrace=False)
    pytest.skip(message)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that start processes, or look at a clock, in one worker of pytest-xdist.

    They need the machine for themselves, but for the one core on which the other worker computes.
    """
    for item in items:
        folder = item.path.relative_to(_TESTS).parent.as_posix()
        starts = any(item.iter_markers("processes")) or any(item.iter_markers("tools"))
        if starts or folder not in _ARITHMETIC:
            item.add_marker(pytest.mark.xdist_group("machine"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what would configure the program from outside, or lead loopback through a proxy."""
    for name in list(os.environ):
        if name.startswith("GRADPILOT_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)

"""What all tests share: a clean environment, and one way to ask for a tool."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest

_ARITHMETIC = frozenset(
    ("bench", "policies", "protos", "simulate", "worker_agent/collectives",
     "worker_agent/compressors")
)  # fmt: skip
"""Folders of tests that only compute, so that they can run beside anything; ``_LABS`` do not."""

_LABS = ("test_netlab", "test_tta_row.")
"""Beginnings of the files among them that make emulated hosts."""

_PATIENT = ("training/", "worker_agent/sharded/", "examples/")
"""Folders of tests that start processes over gloo but look at no clock, ..."""

_IMPATIENT = ("test_elastic", "test_chaos")
"""... but for these: they wait for restarts."""

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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests that look at a clock in one worker of pytest-xdist.

    They need the machine for themselves, but for what the other worker does: first it computes,
    then it trains small models on a few ranks.
    (The plugin's own ``xdist_group`` does nothing in 3.8 with pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByFolder(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            folder, _, name = file.removeprefix("tests/").rpartition("/")
            computes = folder in _ARITHMETIC and not name.startswith(_LABS)
            trains = f"{folder}/".startswith(_PATIENT) and not name.startswith(_IMPATIENT)
            return file if computes or trains else "machine"

    return ByFolder(config, log)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what would configure the program from outside, or lead loopback through a proxy."""
    for name in list(os.environ):
        if name.startswith("GRADPILOT_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)

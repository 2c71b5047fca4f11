from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gradpilot.controller import logs
from gradpilot.controller.latency import SWITCH_SECONDS, keep_the_loop_free
from gradpilot.controller.server import main


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)
    gc.unfreeze()


def test_what_is_loaded_is_not_collected_again() -> None:
    keep_the_loop_free()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < gc.get_freeze_count()


def test_the_controller_does_so_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[float] = []

    def run(serving: Any) -> None:
        serving.close()
        found.extend((sys.getswitchinterval(), float(gc.get_freeze_count() > 0)))

    monkeypatch.setattr(asyncio, "run", run)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    assert main(["--state=:memory:", "--log-level=error"]) == 0
    assert found == pytest.approx([SWITCH_SECONDS, 1.0])

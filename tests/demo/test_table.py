from __future__ import annotations

import io
from typing import Any

import pytest

from gradpilot.demo.table import Table, link_text
from gradpilot.protos.messages import RunDetail, RunSummary
from tests.demo.planted import SLOW, TOPK, decision


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _event(step: int, **fields: Any) -> dict[str, Any]:
    return {
        "event": "progress",
        "kind": "adaptive",
        "step": step,
        "step_seconds": 0.0421,
        "phase": "slow",
        "plan_id": 3,
        "options": [TOPK.label],
        "accuracy": 0.915,
        "loss": 0.3,
        **fields,
    }


def _detail() -> RunDetail:
    summary = RunSummary("demo", "model", "running", 4, 4, 42, 3, "", 0.05, False, "", 0.0)
    return RunDetail(summary, (), decision=decision(3, 42, TOPK, SLOW))


def test_a_row_shows_progress_link_plan_gain_and_accuracy() -> None:
    out = io.StringIO()
    table = Table(out, 120)
    table.header()
    table.row(_event(49), _detail())
    row = out.getvalue().splitlines()[-1]
    for cell in ("adaptive", "50/120", "slow", "42", "1 ms, 50 Mbit/s", TOPK.label, "91.5 %"):
        assert cell in row


def test_rows_without_news_are_left_out_of_a_file() -> None:
    out = io.StringIO()
    table = Table(out, 120)
    for step in range(10, 15):
        table.row(_event(step), None)
    table.row(_event(15, plan_id=4), None)
    table.row(_event(119, plan_id=4), None)
    rows = out.getvalue().splitlines()
    assert [row.split()[1] for row in rows] == ["11/120", "16/120", "120/120"]
    assert "\r" not in out.getvalue()


def test_a_terminal_redraws_the_row_in_place() -> None:
    out = _Terminal()
    table = Table(out, 120)
    for step in range(10, 13):
        table.row(_event(step, accuracy=None), None)
    table.line("done")
    text = out.getvalue()
    assert text.count("\r") >= 3
    assert text.endswith("\r\x1b[2Kdone\n")


@pytest.mark.parametrize(
    ("alpha", "beta", "text"),
    [
        (20e-3, 8e-9, "20 ms, 1 Gbit/s"),
        (1e-3, 8 / 50e6, "1 ms, 50 Mbit/s"),
        (1e-3, 8 / 999.9e6, "1 ms, 1 Gbit/s"),
        (0.1e-3, 0.0, "0.1 ms, no limit seen"),
    ],
)
def test_links_read_well(alpha: float, beta: float, text: str) -> None:
    assert link_text(alpha, beta) == text

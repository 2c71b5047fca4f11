from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from gradpilot.controller import logs


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_is_one_object_a_line() -> None:
    stream = io.StringIO()
    logs.configure("auto", "info", stream)  # no terminal
    logger = logging.getLogger("gradpilot.test")
    logger.info("plan\nsent", extra={"run": 'a"b\n', "plan_id": 3, "rank": 0})
    logger.debug("not shown")
    try:
        raise ValueError("boom")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "plan\nsent"
    assert (first["run"], first["plan_id"], first["rank"]) == ('a"b\n', 3, 0)
    assert first["level"] == "info"
    assert first["time"].endswith("Z")
    assert "ValueError: boom" in second["exception"]


def test_text_quotes_fields() -> None:
    stream = io.StringIO()
    logs.configure("text", "warning", stream)
    logging.getLogger("gradpilot.test").warning("refused", extra={"run": "x\nERROR forged"})
    assert stream.getvalue().count("\n") == 1
    assert r"run='x\nERROR forged'" in stream.getvalue()

"""The controller with scripted agents that the tests of metrics share."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.tools import ROOT

START_SECONDS = 30


@pytest.fixture(scope="session")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Return the HTTP port of a controller that serves every metric."""
    log = tmp_path_factory.mktemp("exporter") / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("exporter.py"))],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            readable, _, _ = select.select([process.stdout], [], [], START_SECONDS)
            line = process.stdout.readline() if readable else ""
            assert line, f"the exporter does not start: {log.read_text()}"
            yield int(line)
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=10)
            finally:
                process.kill()
    assert process.returncode == 0, log.read_text()


@pytest.fixture(scope="session")
def exposition(exporter: int) -> str:
    """Return what /metrics says once every run has decided and every metric has a value."""
    deadline = time.monotonic() + START_SECONDS
    text = ""
    while "gradpilot_plan_info{" not in text or "gradpilot_predicted_step_seconds{" not in text:
        assert time.monotonic() < deadline, f"no decision after {START_SECONDS} s: {text}"
        time.sleep(0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    return text

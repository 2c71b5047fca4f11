"""The compressor of the documentation works as it stands: one source file and one test file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.project import ROOT

PAGE = ROOT / "docs" / "adding-a-compressor.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_documented_compressor_passes_the_suite(tmp_path: Path) -> None:
    source, tests = blocks()
    (tmp_path / "stripes.py").write_text(source)
    (tmp_path / "test_stripes.py").write_text(tests)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:asyncio",
            "-W",
            "error",
            ".",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 100, "the suite was expected to run, not only the test beside it"


def test_the_documented_source_is_in_the_projects_style(tmp_path: Path) -> None:
    path = tmp_path / "stripes.py"
    path.write_text(blocks()[0])
    configuration = ["--config", str(ROOT / "pyproject.toml")]
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run(
            [*ruff, *command, *configuration, str(path)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

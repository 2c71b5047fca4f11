"""What tests of the project itself share: its folders, its files, its pyproject."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

from tests.conftest import require_tool

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = ("controller", "policies", "protos", "worker_agent")
"""Root folders that the package links to."""


def require_clone() -> None:
    """Skip the test, or fail it, outside a clone."""

    def clone() -> bool:
        return (ROOT / ".git").exists()

    require_tool(clone, "only git knows which files belong to the project")


def project_files() -> tuple[Path, ...]:
    """Return what is or would be committed, without links."""
    require_clone()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    paths = sorted({ROOT / name for name in listed.split("\0") if name})
    return tuple(path for path in paths if path.is_file() and not path.is_symlink())

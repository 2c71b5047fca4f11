"""The virtual environment with the tools of deploy/tools.txt: ``python tests/deploy/tools.py``.

It lies in .venv-deploy in the root of the project and is made anew when the list changes. Tests ask
for it with ``require_tool(*TOOLS_VENV)``.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
LIST = ROOT / "deploy" / "tools.txt"
VENV = ROOT / ".venv-deploy"
BIN = VENV / "bin"

_STAMP = VENV / "tools.txt"
"""Copy of the list that the environment was made from."""

_ENVIRON = dict(os.environ)
"""As the session was started: tests take proxies away, pip may need one."""


@functools.cache
def tools_venv() -> bool:
    """Make the environment if need be; return whether it can be used."""
    if _STAMP.is_file() and _STAMP.read_bytes() == LIST.read_bytes():
        return True
    if VENV.exists():
        shutil.rmtree(VENV)
    venv.create(VENV, with_pip=True)
    command = [str(BIN / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--requirement", str(LIST)],
        env=_ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.stderr.write(f"pip install -r {LIST}:\n{done.stdout}\n")
        return False
    shutil.copyfile(LIST, _STAMP)
    return True


TOOLS_VENV = (tools_venv, "python tests/deploy/tools.py makes it with pip")
"""Arguments of ``require_tool``."""


def load_script(path: Path) -> ModuleType:
    """Return a script of deploy/ as a module, which finds its neighbours as if it were run."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


if __name__ == "__main__":
    sys.exit(0 if tools_venv() else 1)

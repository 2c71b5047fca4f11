"""``torchrun ... -m gradpilot.worker_agent train.py``: manage a job whose code stays untouched.

Every DDP model that the script wraps is attached just before its first forward pass in training, so
that a script which registers a communication hook of its own keeps it. Settings come from the
environment.
"""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
from types import ModuleType

from torch.nn.parallel import DistributedDataParallel

from gradpilot.worker_agent.handle import close_all
from gradpilot.worker_agent.managing import manage_every_model
from gradpilot.worker_agent.teardown import settle

USAGE = "usage: torchrun ... -m gradpilot.worker_agent [-m] SCRIPT_OR_MODULE [ARGUMENT ...]"


def main(argv: list[str]) -> None:
    """Run the script as ``__main__``; its exit code and exceptions are its own."""
    as_module = argv[:1] == ["-m"]
    target = argv[1:] if as_module else argv
    if not target or target[0] in ("-h", "--help"):
        sys.stderr.write(f"{USAGE}\n")
        raise SystemExit(0 if target else 2)
    manage_every_model(DistributedDataParallel)
    sys.argv = target
    try:
        if as_module:
            runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(target[0]))  # as python does for a script
            if pkgutil.get_importer(target[0]) is None:
                _run_script(target[0])
            else:  # a folder or an archive with a __main__.py
                runpy.run_path(target[0], run_name="__main__")
    finally:
        close_all()
        settle()


def _run_script(path: str) -> None:
    """Run a script in a module ``__main__`` that stays: its own exit handlers may look for it.

    ``runpy.run_path`` puts ours back as soon as the script's last line is reached.
    """
    module = ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    with io.open_code(os.path.abspath(path)) as file:
        # Or the script would postpone its annotations because this module does.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])

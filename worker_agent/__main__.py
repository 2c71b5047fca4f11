"""``torchrun ... -m gradpilot.worker_agent train.py``: manage a job whose code stays untouched.

Every DDP model that the script wraps is attached just before its first forward pass in training, so
that a script which registers a communication hook of its own keeps it. Settings come from the
environment.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradpilot.errors import GradpilotError
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.handle import close_all
from gradpilot.worker_agent.teardown import settle

log = logging.getLogger("gradpilot.agent")

USAGE = "usage: torchrun ... -m gradpilot.worker_agent [-m] SCRIPT_OR_MODULE [ARGUMENT ...]"


def manage_every_model() -> None:
    """Make every DDP model made from now on attach itself before its first forward pass."""
    original = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)

        def before_first_forward(model: DistributedDataParallel, _: object) -> None:
            if not (torch.is_grad_enabled() and model.training):
                return  # attaching is collective, and one rank may evaluate alone
            registration.remove()
            try:
                attach(model)
            except GradpilotError as error:
                log.warning("this model stays plain DDP: %s", error)

        # A compiled model would have it traced, process groups and all.
        untraced = torch.compiler.disable(before_first_forward)  # type: ignore[no-untyped-call]
        registration = self.register_forward_pre_hook(untraced)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]


def main(argv: list[str]) -> None:
    """Run the script as ``__main__``; its exit code and exceptions are its own."""
    as_module = argv[:1] == ["-m"]
    target = argv[1:] if as_module else argv
    if not target or target[0] in ("-h", "--help"):
        sys.stderr.write(f"{USAGE}\n")
        raise SystemExit(0 if target else 2)
    manage_every_model()
    sys.argv = target
    try:
        if as_module:
            runpy.run_module(target[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(target[0]))  # as python does for a script
            runpy.run_path(target[0], run_name="__main__")
    finally:
        close_all()
        settle()


if __name__ == "__main__":
    main(sys.argv[1:])

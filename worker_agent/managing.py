"""Makes every DDP model of a program attach itself, for programs whose code stays untouched.

This module must not import torch: under ``gradpilot.auto`` it is loaded while torch is.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from gradpilot.errors import GradpilotError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("gradpilot.agent")

_MANAGING = "_gradpilot_manages_every_model"


def manage_every_model(ddp: type[DistributedDataParallel]) -> None:
    """Make every DDP model made from now on attach itself before its first forward pass.

    It waits until then so that a program which registers a communication hook of its own, or which
    attaches the model itself, is left alone.

    Args:
        ddp: The class; changed in place, once however often this is called.
    """
    if hasattr(ddp, _MANAGING):
        return
    setattr(ddp, _MANAGING, True)
    original = ddp.__init__

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        import torch

        original(self, *args, **kwargs)

        def before_first_forward(model: DistributedDataParallel, _: object) -> None:
            if not (torch.is_grad_enabled() and model.training):
                return  # attaching is collective, and one rank may evaluate alone
            registration.remove()
            _attach(model)

        # A compiled model would have it traced, process groups and all.
        untraced = torch.compiler.disable(before_first_forward)  # type: ignore[no-untyped-call]
        registration = self.register_forward_pre_hook(untraced)

    ddp.__init__ = init  # type: ignore[method-assign]


def _attach(model: DistributedDataParallel) -> None:
    from gradpilot.worker_agent.agent import attach
    from gradpilot.worker_agent.handle import Handle
    from gradpilot.worker_agent.hook import Pipeline

    hooks = getattr(model, "_comm_hooks", ())
    if any(isinstance(getattr(state, "handle", state), Handle | Pipeline) for _, state in hooks):
        return  # the program has attached it itself
    try:
        attach(model)
    except GradpilotError as error:
        log.warning("this model stays plain DDP: %s", error)

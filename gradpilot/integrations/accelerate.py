"""Accelerate: ``attach`` after ``accelerator.prepare``.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = gradpilot.integrations.accelerate.attach(accelerator, model)

Not by ``kwargs_handlers``: Accelerate looks a handler's exact class up, so one of ours would be a
KeyError, and its own handler knows no hooks but torch's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from gradpilot.integrations import files
from gradpilot.worker_agent.agent import attach as attach_model
from gradpilot.worker_agent.handle import Handle

if TYPE_CHECKING:
    from accelerate import Accelerator

log = logging.getLogger("gradpilot.agent")


def attach(accelerator: Accelerator, model: nn.Module, **settings: Any) -> Handle | None:
    """Put a prepared model under control; all ranks alike.

    ``accelerator.save_state`` and ``load_state`` then keep a file for each rank beside what they
    write themselves, and the loss scale is the accelerator's.

    Args:
        accelerator: What prepared the model.
        model: What ``prepare`` returned for it.
        **settings: What ``gradpilot.attach`` takes beside the model and ``grad_scaler``.

    Returns:
        The handle; None in a job of one process, which has nothing to send.

    Raises:
        AttachError: The model cannot be managed.
    """
    if accelerator.num_processes == 1:
        log.info("one process only: nothing to manage")
        return None
    handle = attach_model(model, grad_scaler=accelerator.scaler, **settings)  # type: ignore[arg-type]

    def save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        files.save(handle, folder)

    def load(models: list[nn.Module], folder: str) -> None:
        if not files.load(handle, folder):
            log.warning("%s holds no state of gradpilot; starting without residuals", folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return handle

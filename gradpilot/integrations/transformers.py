"""The Trainer of Hugging Face: ``attach(trainer)`` before ``trainer.train()``.

``TrainingArguments`` has no place for a communication hook, and callbacks are given the model that
is not wrapped. So the callback asks the trainer, when training begins, for what it wrapped.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers import TrainerCallback

from gradpilot.integrations import files
from gradpilot.worker_agent.agent import attach as attach_model
from gradpilot.worker_agent.handle import Handle

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

log = logging.getLogger("gradpilot.agent")


class GradpilotCallback(TrainerCallback):  # type: ignore[misc]
    """Manages the model of a trainer while it trains. Made by ``attach``.

    Attributes:
        handle: Of the model that is being trained, or was last; None before, and in a job of one
            process.
    """

    def __init__(self, trainer: Trainer, resume: str, settings: dict[str, Any]) -> None:
        self.handle: Handle | None = None
        self._trainer = trainer
        self._resume = resume
        self._settings = settings

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Attach the wrapped model, and resume where the trainer does; all ranks alike."""
        self.handle = None
        if not dist.is_initialized() or dist.get_world_size() == 1:
            log.info("one process only: nothing to manage")
            return
        trainer = self._trainer
        self.handle = attach_model(
            trainer.model_wrapped, grad_scaler=trainer.accelerator.scaler, **self._settings
        )
        if state.global_step:
            folder = Path(self._resume or _folder(args, state))
            if not files.load(self.handle, folder):
                log.warning("%s holds no state of gradpilot; starting without residuals", folder)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Pass on what the trainer logs anyway."""
        if self.handle is not None and logs:
            self.handle.observe(loss=logs.get("loss"), lr=logs.get("learning_rate"))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Add this rank's file to the checkpoint that was just written."""
        if self.handle is not None:
            files.save(self.handle, _folder(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Let go of the model: the trainer wraps it anew if it trains again."""
        if self.handle is not None:
            self.handle.detach()


def attach(trainer: Trainer, *, resume: str = "", **settings: Any) -> GradpilotCallback:
    """Have a trainer's model managed from the moment at which it is wrapped; all ranks alike.

    Args:
        trainer: Before ``train()``.
        resume: Checkpoint folder that ``train(resume_from_checkpoint=)`` is given, if it is not one
            of the trainer's own output folder: callbacks are not told.
        **settings: What ``gradpilot.attach`` takes beside the model and ``grad_scaler``.

    Returns:
        The callback; ``handle`` is set when training begins.
    """
    callback = GradpilotCallback(trainer, resume, settings)
    trainer.add_callback(callback)
    return callback


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"

"""Lightning: ``Trainer(callbacks=[GradpilotCallback()], strategy="ddp")``.

Not by ``DDPStrategy(ddp_comm_hook=...)``, which Lightning registers on CUDA only and leaves out
elsewhere without a word.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from gradpilot.worker_agent.agent import attach as attach_model
from gradpilot.worker_agent.handle import Handle

# The two packages have classes of their own, and a trainer takes callbacks of its own package.
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger("gradpilot.agent")

CHECKPOINT_KEY = "gradpilot"


class GradpilotCallback(Callback):  # type: ignore[misc]
    """Manages the model of a trainer while it fits.

    Checkpoints hold the state of all ranks: one rank gathers and writes them, as it does for the
    trainer.

    Args:
        observe_steps: Steps between two looks at the loss, 0 for none; on CUDA each waits for the
            step to end.
        **settings: What ``gradpilot.attach`` takes beside the model and ``grad_scaler``.

    Attributes:
        handle: Of the model that is being trained, or was last; None before, and in a job of one
            process.
    """

    def __init__(self, *, observe_steps: int = 50, **settings: Any) -> None:
        self.handle: Handle | None = None
        self._observe_steps = observe_steps
        self._settings = settings
        self._resume: list[dict[str, Any]] | None = None
        self._last: dict[str, Any] | None = None
        """State at the end of training, for a checkpoint that is written after it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the wrapped model, and resume where the trainer does; all ranks alike."""
        self.handle = self._last = None
        if trainer.world_size == 1:
            log.info("one process only: nothing to manage")
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.handle = attach_model(trainer.strategy.model, grad_scaler=scaler, **self._settings)
        resume, self._resume = self._resume, None
        if resume is not None:
            self.handle.load_state_dict(resume)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Pass loss and learning rate on."""
        if self.handle is None or not self._observe_steps or batch_idx % self._observe_steps:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        groups = trainer.optimizers[0].param_groups if trainer.optimizers else ()
        self.handle.observe(
            loss=float(loss) if loss is not None else None,
            lr=float(groups[0]["lr"]) if groups else None,
        )

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Gather the states of all ranks on the one that writes; all ranks alike."""
        if self.handle is None:
            return
        states: list[Any] | None = None
        if trainer.is_global_zero:
            states = [None] * trainer.world_size
        dist.gather_object(self._last or self.handle.state_dict(), states)
        if states is not None:
            checkpoint[CHECKPOINT_KEY] = states

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep what ``on_train_start`` resumes from."""
        self._resume = checkpoint.get(CHECKPOINT_KEY)
        if self._resume is None:
            log.warning("the checkpoint holds no state of gradpilot; starting without residuals")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the model: the trainer wraps it anew if it fits again."""
        if self.handle is not None:
            self._last = self.handle.state_dict()
            self.handle.detach()

"""Handwritten digits with Lightning on two processes, gradients managed by a callback.

torchrun --nproc-per-node 2 examples/train_lightning.py
"""

from __future__ import annotations

import argparse
import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradpilot.integrations.lightning import GradpilotCallback

BUCKET_MB = 0.1
"""Small, so that even this model has several buckets to decide about."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set of 8 x 8 grey images, pixels scaled to 0 .. 1."""
    pixels, labels = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], classes[train]), TensorDataset(images[test], classes[test])


class Perceptron(LightningModule):  # type: ignore[misc]
    """A small multilayer perceptron: 64 pixels to 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the classes."""
        scores: Tensor = self.layers(images)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss of a batch."""
        images, classes = batch
        return nn.functional.cross_entropy(self(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trainer(epochs: int, callback: GradpilotCallback) -> Trainer:
    """Return a trainer for two processes on CPUs."""
    from lightning.pytorch.strategies import DDPStrategy

    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", bucket_cap_mb=BUCKET_MB),
        max_epochs=epochs,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(
    epochs: int, checkpoint: str = "", resume: str = ""
) -> tuple[float, Perceptron, GradpilotCallback]:
    """Train, and return the accuracy on the test set, the model and the callback.

    Args:
        epochs: In all, those before a checkpoint included.
        checkpoint: File to write at the end.
        resume: Checkpoint to begin from.
    """
    torch.manual_seed(0)
    train_set, test_set = digits()
    model, callback = Perceptron(), GradpilotCallback()
    fit = trainer(epochs, callback)
    fit.fit(
        model,
        DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True),
        ckpt_path=resume or None,
    )
    if checkpoint:
        fit.save_checkpoint(checkpoint)
    images, classes = test_set.tensors
    with torch.no_grad():
        guesses = model(images).argmax(dim=1)
    return (guesses == classes).float().mean().item(), model, callback


def main() -> None:
    """Train, and print the accuracy and what was sent on rank 0."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Lightning.")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share one machine
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    accuracy, _, callback = train(arguments.epochs)
    handle = callback.handle
    if handle is not None and handle.rank == 0:
        counters = handle.counters
        sent = counters.wire_bytes / counters.dense_bytes
        print(f"accuracy {accuracy:.3f}, {counters.steps} steps, {sent:.0%} of the bytes sent")


if __name__ == "__main__":
    main()

"""Handwritten digits with Hugging Face's Trainer on two processes, gradients managed by a callback.

torchrun --nproc-per-node 2 examples/train_hf_trainer.py
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import gradpilot.integrations.transformers as integration

BUCKET_MB = 0.1
"""Small, so that even this model has several buckets to decide about."""


class Digits(Dataset[dict[str, Tensor]]):
    """8 x 8 grey images, pixels scaled to 0 .. 1, as the trainer wants them."""

    def __init__(self, part: slice) -> None:
        pixels, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[part]
        self.pixels = torch.tensor(pixels, dtype=torch.float32)[order] / 16
        self.labels = torch.tensor(labels)[order]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixels": self.pixels[index], "labels": self.labels[index]}


class Perceptron(nn.Module):
    """A small multilayer perceptron that returns its loss, as models for the trainer do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss, and the scores of the classes."""
        scores = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def train(
    epochs: int, folder: str, resume: str = ""
) -> tuple[float, Perceptron, integration.GradpilotCallback]:
    """Train, and return the accuracy on the test set, the model and the callback.

    Args:
        epochs: In all, those before a checkpoint included.
        folder: For checkpoints, one each epoch.
        resume: Checkpoint to begin from.
    """
    torch.manual_seed(0)
    model = Perceptron()
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            dataloader_drop_last=True,
            learning_rate=3e-3,
            save_strategy="epoch",
            save_total_limit=1,
            logging_steps=50,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_bucket_cap_mb=BUCKET_MB,
        ),
        train_dataset=Digits(slice(360, None)),
    )
    callback = integration.attach(trainer)
    trainer.train(resume_from_checkpoint=resume or None)
    test = Digits(slice(360))
    with torch.no_grad():
        guesses = model(test.pixels, test.labels)["logits"].argmax(dim=1)
    return (guesses == test.labels).float().mean().item(), model, callback


def main() -> None:
    """Train, and print the accuracy and what was sent on rank 0."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with the Trainer.")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share one machine
    with tempfile.TemporaryDirectory() as folder:
        accuracy, _, callback = train(arguments.epochs, folder)
    handle = callback.handle
    if handle is not None and handle.rank == 0:
        counters = handle.counters
        sent = counters.wire_bytes / counters.dense_bytes
        print(f"accuracy {accuracy:.3f}, {counters.steps} steps, {sent:.0%} of the bytes sent")


if __name__ == "__main__":
    main()

"""Handwritten digits with Accelerate on two processes, gradients managed after ``prepare``.

torchrun --nproc-per-node 2 examples/train_accelerate.py
"""

from __future__ import annotations

import argparse
import gc

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradpilot.integrations.accelerate as integration
from gradpilot import Handle

BUCKET_MB = 0.1
"""Small, so that even this model has several buckets to decide about."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set of 8 x 8 grey images, pixels scaled to 0 .. 1."""
    pixels, labels = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], classes[train]), TensorDataset(images[test], classes[test])


def train(
    epochs: int, checkpoint: str = "", resume: str = ""
) -> tuple[float, nn.Module, Handle | None]:
    """Train, and return the accuracy on the test set, the bare model and the handle.

    Args:
        epochs: To train now.
        checkpoint: Folder to write at the end.
        resume: Folder to begin from.
    """
    torch.manual_seed(0)
    train_set, test_set = digits()
    network = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=BUCKET_MB)]
    )
    model, optimizer, batches = accelerator.prepare(
        network,
        torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9),
        DataLoader(train_set, batch_size=16, shuffle=True, drop_last=True),
    )
    handle = integration.attach(accelerator, model)
    if resume:
        accelerator.load_state(resume)
    loss = nn.CrossEntropyLoss()
    for _ in range(epochs):
        for images, classes in batches:
            optimizer.zero_grad()
            accelerator.backward(loss(model(images), classes))
            optimizer.step()
    if checkpoint:
        accelerator.save_state(checkpoint)
    images, classes = test_set.tensors
    with torch.no_grad():
        guesses = network(images).argmax(dim=1)
    return (guesses == classes).float().mean().item(), network, handle


def main() -> None:
    """Train, and print the accuracy and what was sent on rank 0."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with Accelerate.")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share one machine
    accuracy, _, handle = train(arguments.epochs)
    if handle is not None and handle.rank == 0:
        counters = handle.counters
        sent = counters.wire_bytes / counters.dense_bytes
        print(f"accuracy {accuracy:.3f}, {counters.steps} steps, {sent:.0%} of the bytes sent")
    gc.collect()  # so that nothing holds the process group any more
    Accelerator().end_training()


if __name__ == "__main__":
    main()

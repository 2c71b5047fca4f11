"""Plain data-parallel training: handwritten digits, four processes, nothing of gradpilot in it.

    torchrun --nproc-per-node 4 examples/train_digits.py
    torchrun --nproc-per-node 4 -m gradpilot.worker_agent examples/train_digits.py

Both train the same way; under the second, gradpilot decides how gradients are sent.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BUCKET_MB = 0.1
"""Small, so that even this model has several buckets to decide about."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set of 8 x 8 grey images, pixels scaled to 0 .. 1."""
    pixels, labels = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], classes[train]), TensorDataset(images[test], classes[test])


def network() -> nn.Module:
    """Return a small multilayer perceptron: 64 pixels to 10 classes."""
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def train(epochs: int, batch_size: int, lr: float) -> float:
    """Train on this rank's share of the data; return the accuracy on the test set.

    Everything that holds the process group (the model, its last graph) ends with this function.
    """
    torch.manual_seed(0)
    train_set, test_set = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train_set, seed=0)
    batches = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(network(), bucket_cap_mb=BUCKET_MB)
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, classes in batches:
            optimizer.zero_grad()
            loss(model(images), classes).backward()
            optimizer.step()
    images, classes = test_set.tensors
    with torch.no_grad():
        guesses = model.module(images).argmax(dim=1)
    accuracy: float = (guesses == classes).float().mean().item()
    return accuracy


def main() -> None:
    """Train, and print the accuracy on rank 0."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits with DDP.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share one machine
    dist.init_process_group("gloo")
    accuracy = train(arguments.epochs, arguments.batch_size, arguments.lr)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f}", flush=True)
    # gloo's threads must be joined before the interpreter ends, or the process may abort. That
    # works once nothing holds the group any more, so collect what train() left behind.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Gradients to compress: made up with known statistics, and recorded from a model in training.

Half of what a rank holds is common to all ranks (equal variance of signal and noise).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradpilot.demo import data

CHUNK, CHUNK_SIGMA = 256, 1.5
"""Chunk-local data: every 256 elements share a scale, log-normal with this sigma."""

BATCH, TRAINING_STEPS = 64, 60

Sample = tuple[list[Tensor], tuple[torch.Size, ...]]
"""Gradient of every rank and the shapes of its parameters."""


def samples(elements: int, ranks: int, seed: int) -> Iterator[tuple[str, Sample]]:
    """Yield gradients of about so many elements with the name of their kind."""
    side = int(elements**0.5)
    shape = (torch.Size([side, side]),)
    yield "gaussian", (gaussian(side * side, ranks, seed), shape)
    yield "chunk-local", (chunk_local(side * side, ranks, seed), shape)
    yield "model", recorded(elements, ranks, seed)


def gaussian(n: int, ranks: int, seed: int) -> list[Tensor]:
    """Return normal gradients."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n, generator=generator)
    return [common + torch.randn(n, generator=generator) for _ in range(ranks)]


def chunk_local(n: int, ranks: int, seed: int) -> list[Tensor]:
    """Return normal gradients whose scale changes from chunk to chunk, alike on all ranks."""
    generator = torch.Generator().manual_seed(seed + 1)
    scales = (CHUNK_SIGMA * torch.randn(-(-n // CHUNK), generator=generator)).exp()
    return [g.mul_(scales.repeat_interleave(CHUNK)[:n]) for g in gaussian(n, ranks, seed)]


def heavy_tailed(n: int, ranks: int, seed: int) -> list[Tensor]:
    """Return cubed normal gradients, whose tail is about as heavy as that of real ones."""
    return [g.pow_(3) for g in gaussian(n, ranks, seed)]


def recorded(elements: int, ranks: int, seed: int) -> Sample:
    """Train a small CNN on images and return its gradients on batches of different images.

    Fashion-MNIST where it is installed, else the handwritten digits of scikit-learn.

    Args:
        elements: About how many parameters the model shall have.
        ranks: How many gradients.
        seed: Of parameters and batches.
    """
    dataset = data.load(data.choose())
    side = int(dataset.features**0.5)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(8),
        nn.Conv2d(16, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4096, max(1, round(elements / 4096))),
        nn.ReLU(),
        nn.Linear(max(1, round(elements / 4096)), dataset.classes),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    order = data.batches(dataset, BATCH, 0, 1, seed)

    def backward() -> None:
        chosen = next(order)
        optimizer.zero_grad()
        images = dataset.train_x[chosen].view(-1, 1, side, side)
        loss: Any = nn.functional.cross_entropy(model(images), dataset.train_y[chosen])
        loss.backward()

    for _ in range(TRAINING_STEPS):
        backward()
        optimizer.step()
    gradients = []
    for _ in range(ranks):
        backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    return gradients, tuple(p.shape for p in model.parameters())

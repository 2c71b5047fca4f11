"""What is trained to record gradients: images by a CNN and an MLP, text by a transformer."""

from __future__ import annotations

import argparse
import inspect
import logging
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from gradpilot.demo import data

Batch = tuple[Tensor, Tensor]
Batches = Iterator[list[Batch]]

CONTEXT, WIDTH, LAYERS, HEADS, BYTES = 64, 96, 3, 4, 256
"""Of the transformer: bytes it looks back, width, layers, heads, distinct bytes."""


@dataclass(frozen=True, slots=True)
class Task:
    """A training.

    Attributes:
        name: Key in the recorded file.
        what: One line for people.
        model: Makes the model from a seed; its last dimension is the classes.
        optimizer: Makes its optimizer.
        batches: From a seed and the number of ranks, every step's batch of each rank.
    """

    name: str
    what: str
    model: Callable[[int], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int, int], Batches]


# --- images ------------------------------------------------------------------------------------


def _cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 440), nn.ReLU(),
        nn.Linear(440, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def _mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 384), nn.ReLU(),
        nn.Linear(384, 384), nn.ReLU(),
        nn.Linear(384, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


def _images(name: str, size: int, seed: int, ranks: int) -> Batches:
    dataset = _dataset(name)
    for numbers in data.batches(dataset, size * ranks, 0, 1, seed):
        yield [
            (dataset.train_x[part], dataset.train_y[part]) for part in torch.split(numbers, size)
        ]


@lru_cache(maxsize=2)
def _dataset(name: str) -> data.Dataset:
    return data.load(data.choose(name))


def _sgd(rate: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


# --- text --------------------------------------------------------------------------------------


class _Transformer(nn.Module):
    """A small decoder over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, BYTES)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of the next byte, (batch, CONTEXT, BYTES)."""
        inner = self.layers(self.bytes(x) + self.places, mask=self.mask, is_causal=True)
        scores: Tensor = self.head(inner)
        return scores


def _transformer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return _Transformer()


def _text_batches(seed: int, ranks: int, size: int = 4) -> Batches:
    text = _text()
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (ranks, size), generator=draw)
        windows = text[starts[..., None] + torch.arange(CONTEXT + 1)]
        yield [(w[:, :-1], w[:, 1:]) for w in windows]


@lru_cache(maxsize=1)
def _text() -> Tensor:
    """Return source text that every Python has, as byte numbers."""
    source = "".join(inspect.getsource(module) for module in (argparse, inspect, logging, tarfile))
    return torch.tensor(list(source.encode()), dtype=torch.int64)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "cnn",
            "CNN of 0.8 M parameters on Fashion-MNIST, 16 images a rank, SGD 0.05 with momentum",
            _cnn,
            _sgd(0.05),
            lambda seed, ranks: _images("fashion-mnist", 16, seed, ranks),
        ),
        Task(
            "mlp",
            "MLP of 0.3 M parameters on digits, 16 images a rank, SGD 0.05 with momentum",
            _mlp,
            _sgd(0.05),
            lambda seed, ranks: _images("digits", 16, seed, ranks),
        ),
        Task(
            "transformer",
            "transformer of 0.4 M parameters on Python sources, 4 x 64 bytes a rank, AdamW 0.001",
            _transformer,
            lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            _text_batches,
        ),
    )
}
"""By name."""

"""What is trained: images by a CNN and by a wide MLP, text by a transformer.

The text is Python's own reference, which every interpreter holds as plain English sentences
(``pydoc_data``, 0.46 MB). Debian's bible-kjv would be longer, but its text is in a compressed form
of its own that only its program reads, and a benchmark should not need that program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench._recorded_tasks import CONTEXT
from bench._recorded_tasks import TASKS as RECORDED
from gradpilot.demo import data
from gradpilot.demo.model import accuracy

WARM_UP_STEPS = 20
FALLING = 0.4
"""The learning rate rises over so many steps and falls linearly over the last share of them. It is
constant between, so that reaching a target there takes progress, not the schedule's end."""

Batch = tuple[Tensor, Tensor]

TEST_WINDOWS = 400
"""Pieces of text, of ``CONTEXT`` bytes each, on which the loss is taken."""


@dataclass(frozen=True, slots=True)
class Task:
    """A training.

    Attributes:
        name: Key in ``TASKS``.
        what: One line for people.
        metric: ``accuracy`` (more is better) or ``loss`` (less is), on what was never trained on.
        model: Makes the model from a seed.
        optimizer: Makes its optimizer; ``rate`` is its learning rate.
        rate: Peak learning rate.
        batches: From seed, rank and number of ranks, this rank's batches without end.
        evaluate: Takes the metric.
        targets: Values to be reached, from easy to hard.
        steps: Steps of a training, the same on all networks: as many as a dense one needs to reach
            its hardest targets but one and to meet several phases of those that change.
        bound: What a method may lose in the end: in accuracy, or as a share of the loss.
    """

    name: str
    what: str
    metric: str
    model: Callable[[int], nn.Module]
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    rate: float
    batches: Callable[[int, int, int], Iterator[Batch]]
    evaluate: Callable[[nn.Module], float]
    targets: tuple[float, ...]
    steps: int
    bound: float

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step of ``steps``, the same for all methods."""
        begun = min(1.0, (step + 1) / WARM_UP_STEPS)
        left = (steps - step) / max(FALLING * steps, 1.0)
        return self.rate * min(begun, left)

    @property
    def more_is_better(self) -> bool:
        """Return whether the metric grows."""
        return self.metric == "accuracy"


def loss_of(scores: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean cross entropy over all predictions of a batch."""
    return cross_entropy(scores.flatten(0, -2), wanted.flatten())


# --- images ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _images() -> data.Dataset:
    return data.load(data.choose("fashion-mnist"))


def _image_batches(size: int) -> Callable[[int, int, int], Iterator[Batch]]:
    def batches(seed: int, rank: int, ranks: int) -> Iterator[Batch]:
        dataset = _images()
        for numbers in data.batches(dataset, size, rank, ranks, seed):
            yield dataset.train_x[numbers], dataset.train_y[numbers]

    return batches


def _image_accuracy(model: nn.Module) -> float:
    return accuracy(model, _images().test_x, _images().test_y)


def _mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(),
        nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 512), nn.ReLU(),
        nn.Linear(512, 10),
    )  # fmt: skip


def _sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


# --- text --------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _text() -> tuple[Tensor, Tensor]:
    """Return the bytes to train with and, the last tenth, those to test with."""
    from pydoc_data.topics import topics

    written = "\n".join(topics[key] for key in sorted(topics)).encode()
    codes = torch.frombuffer(bytearray(written), dtype=torch.uint8).to(torch.int64)
    end = int(0.9 * len(codes))
    return codes[:end], codes[end:]


def _windows(text: Tensor, starts: Tensor) -> Batch:
    found = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]


def _text_batches(size: int) -> Callable[[int, int, int], Iterator[Batch]]:
    def batches(seed: int, rank: int, ranks: int) -> Iterator[Batch]:
        text, _ = _text()
        draw = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - CONTEXT - 1, (ranks, size), generator=draw)
            yield _windows(text, starts[rank])

    return batches


@torch.no_grad()
def _text_loss(model: nn.Module) -> float:
    _, text = _text()
    starts = torch.linspace(0, len(text) - CONTEXT - 2, TEST_WINDOWS).to(torch.int64)
    model.eval()
    losses = [
        loss_of(model(x), y) for x, y in (_windows(text, s) for s in torch.split(starts, 100))
    ]
    model.train()
    return float(torch.stack(losses).mean())


def _adamw(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "cnn",
            "CNN of 0.8 M parameters on Fashion-MNIST, 32 images a rank, SGD with momentum",
            "accuracy",
            RECORDED["cnn"].model,
            _sgd,
            0.05,
            _image_batches(32),
            _image_accuracy,
            (0.80, 0.84, 0.86, 0.87, 0.88),
            500,
            0.003,
        ),
        Task(
            "transformer",
            "transformer of 0.4 M parameters on text, 8 x 64 bytes a rank, AdamW",
            "loss",
            RECORDED["transformer"].model,
            _adamw,
            2e-3,
            _text_batches(8),
            _text_loss,
            (2.6, 2.4, 2.2, 2.0, 1.9),
            500,
            0.01,
        ),
        Task(
            "mlp",
            "MLP of 2.4 M parameters on Fashion-MNIST, 32 images a rank, SGD with momentum",
            "accuracy",
            _mlp,
            _sgd,
            0.05,
            _image_batches(32),
            _image_accuracy,
            (0.80, 0.83, 0.85, 0.86),
            400,
            0.003,
        ),
    )
}
"""By name."""


def evaluations(steps: int, wanted: int = 30) -> tuple[int, ...]:
    """Return the steps after which a training is evaluated: about ``wanted``, and the last.

    A short one less often, every sixth step, for an evaluation takes longer than several steps.
    """
    wanted = min(wanted, max(6, steps // 6))
    every = max(1, math.ceil(steps / wanted))
    return tuple(sorted({*range(every - 1, steps, every), steps - 1}))

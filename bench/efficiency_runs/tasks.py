"""What is learned: articles of clothing by a small CNN, and the next character of a real text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from gradpilot.demo.data import choose, load

EVALUATED = 1000
"""Samples that a loss is taken of, test and held-out samples each."""

CONTEXT = 12
"""Characters from which the next one is foretold."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs and classes.

    Attributes:
        x: (samples, ...), what the model takes.
        y: (samples,), int64.
    """

    x: Tensor
    y: Tensor


@dataclass(frozen=True, slots=True)
class Task:
    """A data set, a model and how it is trained.

    Attributes:
        name: ``images`` or ``text``.
        data: Name of the data set.
        train: Samples to train with.
        held_out: Samples that learning rates are chosen by.
        test: Samples that efficiency is judged by.
        classes: Number of classes.
        model: Makes the model; the caller seeds torch beforehand.
        batch: Samples per rank and step.
        rate: Where the search for dense training's learning rate starts.
    """

    name: str
    data: str
    train: Samples
    held_out: Samples
    test: Samples
    classes: int
    model: Callable[[], nn.Module]
    batch: int
    rate: float

    def batches(self, ranks: int, seed: int) -> Iterator[Tensor]:
        """Yield (ranks, batch) sample numbers without end, drawn with replacement."""
        draw = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(len(self.train.y), (ranks, self.batch), generator=draw)


@lru_cache(maxsize=1)
def images() -> Task:
    """Return the images of the demo (Fashion-MNIST where it is installed), at half resolution."""
    data = load(choose())
    side = int(data.features**0.5)
    factor = max(1, side // 14)

    def shrink(x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x.view(-1, 1, side, side), factor)

    small = side // factor
    after = (small - 4) // 2 + 1

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * after * after, 64),
            nn.ReLU(),
            nn.Linear(64, data.classes),
        )

    train, held = apart(Samples(shrink(data.train_x), data.train_y))
    test = _some(Samples(shrink(data.test_x), data.test_y))
    return Task("images", data.name, train, held, test, data.classes, model, batch=32, rate=0.1)


@lru_cache(maxsize=1)
def text() -> Task:
    """Return the next character of Python's own reference, which every interpreter brings along.

    The last tenth of the text is for the test, the tenth before for held-out samples: windows drawn
    at random from one text would overlap.
    """
    from pydoc_data.topics import topics

    written = "\n".join(topics[key] for key in sorted(topics))
    known = {character: i for i, character in enumerate(sorted(set(written)))}
    codes = torch.tensor([known[character] for character in written])
    end = len(codes) - CONTEXT
    first, second = int(0.8 * end), int(0.9 * end)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(len(known), 12),
            nn.Flatten(),
            nn.Linear(12 * CONTEXT, 96),
            nn.ReLU(),
            nn.Linear(96, len(known)),
        )

    train, held, test = (
        windows(codes[part]) for part in (slice(first), slice(first, second), slice(second, end))
    )
    name = "reference of Python"
    return Task(
        "text", name, train, _some(held), _some(test), len(known), model, batch=32, rate=0.4
    )


def windows(codes: Tensor) -> Samples:
    """Return every run of ``CONTEXT`` codes with the code that follows it."""
    runs = codes.unfold(0, CONTEXT + 1, 1)
    return Samples(runs[:, :-1], runs[:, -1])


TASKS: dict[str, Callable[[], Task]] = {"images": images, "text": text}


def _some(samples: Samples) -> Samples:
    """Return up to ``EVALUATED`` samples, always the same."""
    order = torch.randperm(len(samples.y), generator=torch.Generator().manual_seed(0))[:EVALUATED]
    return Samples(samples.x[order], samples.y[order])


def apart(samples: Samples) -> tuple[Samples, Samples]:
    """Return the samples less ``EVALUATED`` (at most a third) of them, and these."""
    order = torch.randperm(len(samples.y), generator=torch.Generator().manual_seed(0))
    out = min(EVALUATED, len(order) // 3)
    held, kept = order[:out], order[out:]
    return Samples(samples.x[kept], samples.y[kept]), Samples(samples.x[held], samples.y[held])

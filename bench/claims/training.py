"""Small trainings on virtual ranks: every rank's gradient, one bucket, the compressor's own code.

A network with one hidden layer, its parameters one flat bucket; SGD with momentum, warm-up and half
a cosine as in the demo. The gradients of all ranks come from one vectorised call, so a thousand
ranks take one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from gradpilot.demo.data import Dataset, batches, choose, load
from gradpilot.demo.model import accuracy, learning_rate
from gradpilot.protos.messages import Option
from gradpilot.worker_agent.statistics import gain, squared_norm
from gradpilot.worker_agent.virtual import virtual_step

HELD_OUT = 0.1
"""Share of the training samples that learning rates are judged by."""

Chooser = Callable[[int, Sequence[Tensor]], Option]
"""Returns the option of a step; given its number and all ranks' corrected gradients."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained.

    Attributes:
        ranks: Ranks N.
        steps: Steps.
        batch: Samples per rank and step.
        rate: Peak learning rate.
        momentum: Momentum of SGD.
        hidden: Width of the hidden layer.
        one_class: Whether every rank holds the samples of one class only, N classes in all.
    """

    ranks: int
    steps: int
    batch: int
    rate: float
    momentum: float
    hidden: int = 64
    one_class: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of a training.

    Attributes:
        accuracy: Share of test samples whose class was found.
        held_out: The same of samples held out of training; to choose a learning rate by.
        gain: Mean over steps and ranks of ||sent||^2 / ||corrected||^2.
        residual: Mean over steps and ranks of ||residual||^2 / ||gradient||^2.
    """

    accuracy: float
    held_out: float
    gain: float
    residual: float


@lru_cache(maxsize=1)
def dataset() -> Dataset:
    """Return the data set of the demo: Fashion-MNIST where it is installed, else digits."""
    return load(choose())


@lru_cache(maxsize=8)
def split(classes: int) -> tuple[Dataset, Tensor, Tensor]:
    """Return the first classes of the data set less the samples held out, and these."""
    data = dataset()
    train, test = data.train_y < classes, data.test_y < classes
    x, y = data.train_x[train], data.train_y[train]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    out = int(HELD_OUT * len(x))
    kept = order[out:]
    part = Dataset(data.name, x[kept], y[kept], data.test_x[test], data.test_y[test], classes)
    return part, x[order[:out]], y[order[:out]]


def train(job: Job, options: Option | Chooser, seed: int) -> Outcome:
    """Train and test a network.

    Args:
        job: What is trained.
        options: Option of the bucket, or what chooses one for every step.
        seed: Seed of parameters, batches and compressors.
    """
    data, held_x, held_y = split(job.ranks if job.one_class else dataset().classes)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(data.features, job.hidden), nn.ReLU(), nn.Linear(job.hidden, data.classes)
    )
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]

    def as_parameters(flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        return {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}

    def loss(parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, dict(parameters), (x,)), y)

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
    velocity = torch.zeros_like(flat)
    residuals: Sequence[Tensor] | None = None
    gains, kept_back = [], []
    samples = _one_class(data, job, seed) if job.one_class else _shared(data, job, seed)
    for step, numbers in zip(range(job.steps), samples, strict=False):
        per_rank = gradients(as_parameters(flat), data.train_x[numbers], data.train_y[numbers])
        stacked = torch.cat([per_rank[name].reshape(job.ranks, -1) for name in names], dim=1)
        grads = list(stacked)
        corrected = grads
        if residuals is not None:
            corrected = [g + r for g, r in zip(grads, residuals, strict=True)]
        option = options if isinstance(options, Option) else options(step, corrected)
        done = virtual_step(option, grads, residuals, step=step, seed=seed)
        residuals = done.residuals
        if step % 10 == 9:
            of_ranks = zip(done.estimates, corrected, strict=True)
            gains += [gain(e.sent, squared_norm(c)) for e, c in of_ranks]
            left = sum(squared_norm(r) for r in residuals)
            kept_back.append(left / max(sum(squared_norm(g) for g in grads), 1e-30))
        velocity.mul_(job.momentum).add_(done.mean)
        flat.sub_(velocity, alpha=learning_rate(step, job.steps, job.rate))
    model.load_state_dict(as_parameters(flat))
    return Outcome(
        accuracy(model, data.test_x, data.test_y),
        accuracy(model, held_x, held_y),
        sum(gains) / len(gains),
        sum(kept_back) / len(kept_back),
    )


def _shared(data: Dataset, job: Job, seed: int) -> Iterator[Tensor]:
    """Yield (ranks, batch) sample numbers: one permutation of all samples, shared out."""
    together = batches(data, job.ranks * job.batch, 0, 1, seed)
    return (numbers.view(job.ranks, job.batch) for numbers in together)


def _one_class(data: Dataset, job: Job, seed: int) -> Iterator[Tensor]:
    """Yield (ranks, batch) sample numbers, rank r's of class r."""
    draw = torch.Generator().manual_seed(seed)
    members = [(data.train_y == label).nonzero().view(-1) for label in range(job.ranks)]
    while True:
        yield torch.stack([m[torch.randint(len(m), (job.batch,), generator=draw)] for m in members])


@lru_cache(maxsize=256)
def trained(job: Job, option: Option, seed: int) -> Outcome:
    """Return ``train`` of one option, done once for all claims that need it."""
    return train(job, option, seed)


def mean_accuracy(job: Job, option: Option, seeds: Sequence[int]) -> float:
    """Return the mean accuracy over seeds, in percent."""
    return 100 * sum(trained(job, option, seed).accuracy for seed in seeds) / len(seeds)

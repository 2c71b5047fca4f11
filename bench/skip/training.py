"""One training on virtual ranks whose network has a bucket per layer, as DDP would have several.

Jobs and data are those of ``bench.claims.training``, whose own training has a single bucket: what
selective skipping spares is a bucket.

Letters: N ranks, g_r gradient of a rank, A mean of ||g_r||^2, B ||mean of g_r||^2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from bench.claims.training import Job, dataset, split
from gradpilot.demo.data import Dataset, batches
from gradpilot.demo.model import accuracy, learning_rate
from gradpilot.policies.importance import top_shares
from gradpilot.policies.signal import signal_to_noise
from gradpilot.protos.messages import Option
from gradpilot.worker_agent.statistics import magnitudes, squared_norm
from gradpilot.worker_agent.virtual import virtual_step

SAMPLED_AT = 20
"""Step at which selective skipping looks which bucket matters; nothing is spared before."""

LAST_HIDDEN = 128
"""Width of the second hidden layer: the output layer has enough elements to be skipped at all."""

EVERY = 10
"""Steps between two looks at signal and noise."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What came out of a training.

    Attributes:
        accuracy: Share of test samples whose class was found.
        held_out: The same of samples held out of training; to choose a learning rate by.
        snr: Signal-to-noise ratio of one rank's gradient, see ``policies.signal``.
        spared: Share of all elements that lies in the bucket that selective skipping spared.
    """

    accuracy: float
    held_out: float
    snr: float
    spared: float


def train(job: Job, option: Option, seed: int, *, selective: bool = False) -> Trained:
    """Train and test a network of two hidden layers.

    Args:
        job: What is trained.
        option: Option of every bucket.
        seed: Seed of parameters, batches and rotation.
        selective: Whether the most important bucket skips nothing; which one that is is looked at
            once, as published.
    """
    data, held_x, held_y = split(job.ranks if job.one_class else dataset().classes)
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(data.features, job.hidden), nn.ReLU(), nn.Linear(job.hidden, LAST_HIDDEN)),
        *(nn.ReLU(), nn.Linear(LAST_HIDDEN, data.classes)),
    )
    buckets = [
        [f"{name}.{part}" for part, _ in layer.named_parameters()]
        for name, layer in model.named_children()
        if isinstance(layer, nn.Linear)
    ]
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    velocity = [torch.zeros(sum(values[n].numel() for n in names)) for names in buckets]
    residuals: list[Sequence[Tensor] | None] = [None] * len(buckets)

    def loss(parameters: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, dict(parameters), (x,)), y)

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    spared = -1
    energies: list[tuple[float, float]] = []
    for step, numbers in zip(range(job.steps), _samples(data, job, seed), strict=False):
        per_rank = gradients(values, data.train_x[numbers], data.train_y[numbers])
        grads = [
            list(torch.cat([per_rank[name].reshape(job.ranks, -1) for name in names], dim=1))
            for names in buckets
        ]
        if selective and step == SAMPLED_AT:
            spared = most_important(grads)
        if step % EVERY == EVERY - 1:
            energies.append(_energies(grads))
        for b, names in enumerate(buckets):
            used = replace(option, skip=0) if b == spared else option
            done = virtual_step(used, grads[b], residuals[b], step=step, bucket=str(b), seed=seed)
            residuals[b] = done.residuals
            velocity[b].mul_(job.momentum).add_(done.mean)
            change = velocity[b] * learning_rate(step, job.steps, job.rate)
            sizes = [values[name].numel() for name in names]
            for name, part in zip(names, torch.split(change, sizes), strict=True):
                values[name] -= part.view_as(values[name])
    model.load_state_dict(values)
    sizes = [len(v) for v in velocity]
    a, b_ = (sum(of) / len(energies) for of in zip(*energies, strict=True))
    return Trained(
        accuracy(model, data.test_x, data.test_y),
        accuracy(model, held_x, held_y),
        signal_to_noise(a, b_, job.ranks),
        sizes[spared] / sum(sizes) if spared >= 0 else 0.0,
    )


def most_important(grads: Sequence[Sequence[Tensor]]) -> int:
    """Return the bucket most of whose elements are among the largest of the whole gradient.

    Args:
        grads: Gradient of every rank, by bucket.
    """
    histograms = [
        [sum(counts) for counts in zip(*(magnitudes(g) for g in of_ranks), strict=True)]
        for of_ranks in grads
    ]
    shares = top_shares(histograms)
    return shares.index(max(shares))


def _energies(grads: Sequence[Sequence[Tensor]]) -> tuple[float, float]:
    """Return A and B."""
    a = sum(squared_norm(g) for of_ranks in grads for g in of_ranks) / len(grads[0])
    b = sum(squared_norm(torch.stack(list(of_ranks)).mean(0)) for of_ranks in grads)
    return a, b


def _samples(data: Dataset, job: Job, seed: int) -> Iterator[Tensor]:
    """Yield (ranks, batch) sample numbers: shared out of all, or rank r's of class r."""
    if not job.one_class:
        together = batches(data, job.ranks * job.batch, 0, 1, seed)
        yield from (numbers.view(job.ranks, job.batch) for numbers in together)
    draw = torch.Generator().manual_seed(seed)
    members = [(data.train_y == label).nonzero().view(-1) for label in range(job.ranks)]
    while True:
        yield torch.stack([m[torch.randint(len(m), (job.batch,), generator=draw)] for m in members])

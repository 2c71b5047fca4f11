"""One training on virtual ranks, the loss on its way, and what compression did to the gradient.

Letters: N ranks, g_r a rank's gradient, gbar their mean, ghat its estimate, r_r a rank's residual,
W steps of a window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.efficiency_runs.statistics import Watch
from bench.efficiency_runs.tasks import Samples, Task
from gradpilot.policies.gain import skip_gain
from gradpilot.protos.messages import Option
from gradpilot.worker_agent.virtual import virtual_step

RANKS = 4
MOMENTUM = 0.9
WARM_UP = 20
"""Steps over which the learning rate rises; it is constant afterwards, since a falling one would
make all methods reach a target when it falls."""

EVERY = 10
"""Steps between two evaluations."""

HOPELESS = 3.0
"""A training is given up once its loss is so many times that of the untrained model."""


@dataclass(frozen=True, slots=True)
class Run:
    """What came out of a training.

    Attributes:
        test: Loss on test samples after every ``EVERY`` steps, nats; shorter if it diverged.
        held_out: The same of held-out samples.
        start: Loss of the untrained model on test samples.
        accuracy: Share of test samples whose class was found in the end.
        diverged: Whether it was given up or ended with a loss no better than untrained.
        statistics: See ``statistics.Watch.summary``.
        residuals: Residual ratio, ``sum ||r_r||^2 / sum ||g_r||^2``: the largest within every
            ``EVERY`` steps.
        norms: Mean of ``||g_r||^2`` over ranks, likewise the largest.
    """

    test: list[float]
    held_out: list[float]
    start: float
    accuracy: float
    diverged: bool
    statistics: dict[str, float]
    residuals: list[float]
    norms: list[float]


def train(task: Task, option: Option, rate: float, seed: int, steps: int) -> Run:
    """Train once.

    Args:
        task: What is learned.
        option: Option of the one bucket that holds all parameters.
        rate: Learning rate after the warm-up.
        seed: Seed of parameters, batches and compressors.
        steps: Steps.
    """
    torch.manual_seed(seed)
    model = task.model()
    parameters = list(model.parameters())
    shapes = tuple(p.shape for p in parameters)
    sizes = [p.numel() for p in parameters]
    velocity = torch.zeros(sum(sizes))
    silent = option.skip > 0 and not option.skip_feedback
    heard = skip_gain(option.collective, RANKS, option.skip) if silent else 1.0
    watch = Watch(heard)
    residuals, memories = None, None
    test: list[float] = []
    held_out: list[float] = []
    start = _loss(model, task.test)
    given_up = False
    for step, numbers in zip(range(steps), task.batches(RANKS, seed), strict=False):
        grads = [_gradient(model, parameters, task.train, own) for own in numbers]
        done = virtual_step(
            option, grads, residuals, step=step, seed=seed, shapes=shapes, memories=memories
        )
        watch.see(step, grads, residuals, done)
        residuals, memories = done.residuals, done.memories
        velocity.mul_(MOMENTUM).add_(done.mean)
        now = rate * min(1.0, (step + 1) / WARM_UP)
        with torch.no_grad():
            for p, part in zip(parameters, torch.split(velocity, sizes), strict=True):
                p.sub_(part.view(p.shape), alpha=now)
        if step % EVERY == EVERY - 1:
            test.append(_loss(model, task.test))
            held_out.append(_loss(model, task.held_out))
            if not test[-1] < HOPELESS * start:
                given_up = True
                break
    tail = test[-5:]
    return Run(
        test=[t for t in test if math.isfinite(t)],
        held_out=[h for h in held_out if math.isfinite(h)],
        start=start,
        accuracy=_accuracy(model, task.test),
        diverged=given_up or not sum(tail) / len(tail) < start,
        statistics=watch.summary(),
        residuals=watch.residuals(EVERY),
        norms=watch.norms(EVERY),
    )


def _gradient(
    model: nn.Module, parameters: list[nn.Parameter], samples: Samples, numbers: Tensor
) -> Tensor:
    loss = cross_entropy(model(samples.x[numbers]), samples.y[numbers])
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)])


@torch.no_grad()
def _loss(model: nn.Module, samples: Samples) -> float:
    return float(cross_entropy(model(samples.x), samples.y))


@torch.no_grad()
def _accuracy(model: nn.Module, samples: Samples) -> float:
    return float((model(samples.x).argmax(1) == samples.y).float().mean())

"""The model that is trained: small enough for four ranks on two cores."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

HIDDEN = (512, 512, 384, 256)
"""Widths of the hidden layers; 0.6 M parameters on digits, 1.0 M on Fashion-MNIST."""

BUCKET_CAP_MB = 0.25
"""Makes four buckets of quite different sizes, so that latency and bandwidth can be told apart."""

WARM_UP_STEPS = 20


def make_model(features: int, classes: int, seed: int) -> nn.Module:
    """Return a multilayer perceptron; equal seeds give equal parameters."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width in HIDDEN:
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, classes))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of a step: a linear warm-up, then half a cosine down to 0."""
    if step < WARM_UP_STEPS:
        return peak * (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(steps - WARM_UP_STEPS, 1)
    return peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of samples whose class the model finds, [0, 1]."""
    model.eval()
    hits = sum(
        int((model(x[i : i + 1000]).argmax(1) == y[i : i + 1000]).sum())
        for i in range(0, len(x), 1000)
    )
    model.train()
    return hits / len(x)


@torch.no_grad()
def checksum(model: nn.Module) -> str:
    """Return 16 hex digits that differ if any bit of any parameter differs."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(-1).numpy().data)
    return digest.hexdigest()

"""A small DDP job with several buckets, for tests that run on N ranks."""

from __future__ import annotations

import copy
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradpilot.protos.messages import DENSE, Assignment, Option, Plan, Setting
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.handle import Handle

BUCKET_MB = 0.01
WIDTH = 64

STAR = (Setting("selection", "star"),)
VAR = (Setting("selection", "var"),)

OPTIONS: tuple[Option, ...] = (
    DENSE,
    Option("fp16"),
    Option("bf16"),
    Option("topk", 0.01, "allgather"),
    Option("topk", 0.3, "allgather"),
    Option("artopk", 0.05, "native", settings=STAR),
    Option("artopk", 0.5, "native", settings=VAR),
    Option("none", collective="ring"),
    Option("none", collective="ring", skip=1),
    Option("bf16", collective="ring", skip=2, divisor="drop"),
    Option("none", collective="ring", skip=1, rotation="static", skip_feedback=True),
    Option("artopk", 0.5, "ring", skip=1, skip_feedback=True, settings=STAR),
)
"""One of each kind; skips fit 3 ranks and more."""


def model(seed: int = 0) -> nn.Module:
    """Return a model that makes at least 4 buckets of ``BUCKET_MB``."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


def wrap(**options: object) -> DistributedDataParallel:
    """Return the model in DDP with several buckets."""
    return DistributedDataParallel(model(), bucket_cap_mb=BUCKET_MB, **options)  # type: ignore[arg-type]


def control(ddp: DistributedDataParallel, start: Option = DENSE) -> Handle:
    """Attach without a controller, with short windows."""
    return attach(ddp, controller="off", start=start, control_timeout_seconds=5.0)


def batch(rank: int, step: int) -> Tensor:
    """Return a rank's own data of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, WIDTH, generator=generator)


def backward(net: nn.Module, rank: int, step: int) -> None:
    """Run one forward and backward pass."""
    net(batch(rank, step)).square().sum().backward()


def gradients(net: nn.Module) -> Tensor:
    """Return all gradients as one vector, in parameter order."""
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def local_gradients(net: DistributedDataParallel, rank: int, step: int) -> Tensor:
    """Return what this rank's gradient is before any communication."""
    alone = copy.deepcopy(net.module)
    for p in alone.parameters():
        p.grad = None
    backward(alone, rank, step)
    return gradients(alone)


def digest(tensor: Tensor) -> str:
    """Return a hash of the bits."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def same_everywhere(value: str) -> bool:
    """Return whether all ranks hold this value."""
    values: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return len(set(values)) == 1


def uniform_plan(handle: Handle, number: int, option: Option, interval: int = 1) -> Plan:
    """Return a plan that gives all buckets of the present layout this option."""
    layout = handle.layout
    assert layout is not None
    assigned = tuple(Assignment(b.fingerprint, option) for b in layout.buckets)
    return Plan(1, number, layout.digest, assigned, DENSE, interval, "test", "because")

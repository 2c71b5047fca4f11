"""Small sharded jobs for tests that run on N ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradpilot.protos.messages import DENSE, Option
from gradpilot.protos.option_text import parse_option
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.sharded import Sharding

WIDTH, HIDDEN, CLASSES = 40, 37, 5
"""Neither 37 nor 5 rows can be divided by 2 or 4 ranks."""

BF16 = parse_option("bf16")
INT8 = parse_option("int8 collective=alltoall exchange=all_to_all")


def skip(steps: int, **fields: Any) -> Option:
    """Return an option that leaves ring steps out."""
    return Option("none", collective="ring", skip=steps, **fields)


class Net(nn.Module):
    """Two layers that are sharded on their own and parameters that stay with the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.second = nn.Linear(HIDDEN, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score of every class."""
        hidden: Tensor = self.second(self.first(x).tanh()).tanh()
        scores: Tensor = self.last(hidden)
        return scores


def fully_sharded(mesh: Any = None, seed: int = 0, **options: Any) -> Net:
    """Return the net under FSDP2, equal on all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    net = Net()
    if mesh is None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net.first, net.second, net):
        fully_shard(part, mesh=mesh, **options)
    return net


def batch(rank: int, step: int) -> Tensor:
    """Return a rank's own data of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, WIDTH, generator=generator)


def loss_of(net: nn.Module, rank: int, step: int) -> Any:
    """Return the loss of a rank's batch, a tensor."""
    scores: Tensor = net(batch(rank, step))
    return scores.square().mean() + scores.mean()


def train(
    net: nn.Module, steps: int, after: Callable[[int], None] | None = None, first: int = 0
) -> nn.Module:
    """Train a net with momentum and return it."""
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(first, first + steps):
        loss_of(net, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step)
    return net


def control(net: nn.Module, start: Option = DENSE, **sharding: Any) -> Any:
    """Attach without a controller."""
    return attach(net, controller="off", start=start, sharding=Sharding(**sharding))  # type: ignore[arg-type]


def whole(net: nn.Module) -> Tensor:
    """Return all parameters in full, as their owners hold them."""
    return torch.cat(
        [
            (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten()
            for p in net.parameters()
        ]
    )


def equal_everywhere(tensor: Tensor) -> bool:
    """Return whether all ranks hold the same bits."""
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.contiguous())
    return all(torch.equal(other, tensor) for other in others)

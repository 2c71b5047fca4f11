"""The model of all modes, and what some modes need of it.

Layers stand in blocks of two, which are what is checkpointed or sharded as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model is, and its data.

    Attributes:
        width: Features in and out of every layer.
        blocks: Blocks of two layers.
        batch: Examples of a rank's step.
        bucket_mb: Of DDP, 2^20 bytes.
    """

    width: int = 512
    blocks: int = 4
    batch: int = 512
    bucket_mb: float = 2.0


def stack(size: Size, blocks: int | None = None) -> nn.Sequential:
    """Return blocks one after the other; as many as the size says, or as told."""
    return nn.Sequential(*(_block(size.width) for _ in range(blocks or size.blocks)))


class Branches(nn.Module):
    """Ends in one of two branches in turn; of two ranks each takes what the other leaves out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.trunk = stack(size, size.blocks - 1)
        self.branches = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(2))
        self.turn = dist.get_rank()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of this turn's branch."""
        self.turn += 1
        out: Tensor = self.branches[self.turn % 2](self.trunk(x))
        return out


class Checkpointed(nn.Module):
    """Recomputes every block in backward.

    Args:
        size: Of the model.
        reentrant: Kind of checkpointing.
    """

    def __init__(self, size: Size, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(size.width, size.width)
        self.middle = stack(size)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the activations within blocks thrown away."""
        x = self.first(x)
        for block in self.middle:
            x = checkpoint(block, x, use_reentrant=self._reentrant)
        return x


class Mixed(nn.Module):
    """Most of it in float32, one layer in float64 and one block in bfloat16."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.single = stack(size, size.blocks - 1)
        self.exact = nn.Linear(size.width, size.width).double()
        self.short = _block(size.width).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, bfloat16."""
        out: Tensor = self.short(self.exact(self.single(x).double()).bfloat16())
        return out


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Return a module's parameters, of sharded ones what this rank holds."""
    with torch.no_grad():
        return [_local(p) for p in module.parameters()]


def _block(width: int) -> nn.Sequential:
    return nn.Sequential(*(m for _ in range(2) for m in (nn.Linear(width, width), nn.ReLU())))


def _local(parameter: Tensor) -> Tensor:
    held: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return held

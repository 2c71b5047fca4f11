"""What only sharded models need to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Settings of a sharded model, the same on all ranks.

    Attributes:
        replicas: Ranks that hold the same shard, where ``fully_shard`` was given the shard
            dimension of a mesh alone: gradients are then averaged over them by the option, and
            reduced densely inside the shard group. They must start with equal parameters.
        feedback: Whether 16 and 8 bits keep what rounding takes away; that needs memory for two
            unsharded gradients on every rank.
        weight_refresh_steps: With an option that skips: steps after which weights that a rank left
            out are renewed; 0 gathers all weights always.
        warm_up: Whether nothing is skipped before the gradient is stable.
    """

    replicas: dist.ProcessGroup | None = None
    feedback: bool = True
    weight_refresh_steps: int = 0
    warm_up: bool = True

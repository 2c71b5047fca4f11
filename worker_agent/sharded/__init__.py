"""Models whose parameters are sharded: FSDP2, FSDP1, and FSDP2 with replicas.

``gradpilot.attach`` leads here for such models; see ``attach``. This file imports nothing of FSDP,
which costs a job that does not use it half a second.
"""

from __future__ import annotations

import sys

from gradpilot.worker_agent.sharded.settings import Sharding

__all__ = ["Sharding", "is_sharded"]


def is_sharded(model: object) -> bool:
    """Return whether FSDP1 or FSDP2 shards this model's parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nobody shards without having imported it
    if fsdp is None:
        return False
    return isinstance(model, fsdp.FSDPModule | fsdp.FullyShardedDataParallel)

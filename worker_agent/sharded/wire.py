"""The driver of sharded exchanges, on the process group that the framework hands over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import Collective, ReduceScatter
from gradpilot.worker_agent.collectives.reduction import SUM
from gradpilot.worker_agent.compressors.base import At
from gradpilot.worker_agent.peers import run_steps
from gradpilot.worker_agent.sharded.ring import ring_order, scatter_schedule
from gradpilot.worker_agent.wire import Wire


class Allocates:
    """Makes room for what FSDP2 exchanges as FSDP2 does by default."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised room for a gradient, a shard or parameters."""
        return torch.empty(*size, dtype=dtype, device=device)


class ShardWire(Wire):
    """Carries out requests in the thread and on the stream of whoever calls.

    FSDP orders its work by streams and never waits on the host; nor does this, so on CUDA its
    stamps tell when calls returned and not what they took.
    """

    def _exchange(
        self, request: Collective, option: Option, at: At, group: dist.ProcessGroup
    ) -> Tensor:
        if not (isinstance(request, ReduceScatter) and option.collective == "ring"):
            return super()._exchange(request, option, at, group)
        schedule = scatter_schedule(ring_order(at, option.rotation), at.rank, option.skip)
        run_steps(group, request.payload, schedule, SUM, self._preposts)
        return request.payload.view(at.world_size, -1)[at.rank]

    def _synchronize(self) -> None:
        """Do not wait for the device."""

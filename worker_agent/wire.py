"""The driver of compressors over a process group, and the thread that it blocks.

Collectives are issued from the hook itself or from this thread, in the order of the buckets, never
from the callback of a future: on gloo that aborts or deadlocks, since callbacks run in an order of
their own on every rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import (
    SCHEDULES,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
)
from gradpilot.worker_agent.collectives.reduction import MAX
from gradpilot.worker_agent.collectives.skipping import backend_carries, schedule_for, settle
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.peers import run_steps
from gradpilot.worker_agent.threads import OrderedThread

# torch 2.13 calls them by other names and warns of the old ones; older ones know only those.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Stamp:
    """One request as it was carried out.

    Attributes:
        collective: One of ``messages.COLLECTIVES``.
        bytes: Payload bytes that this rank handed in.
        skip: Steps of our own all-reduce left out.
        seconds: From handing in to having the reply.
    """

    collective: str
    bytes: int
    skip: int
    seconds: float


@dataclass(slots=True)
class Timing:
    """What one bucket cost on this rank; device time where the wire can tell.

    Attributes:
        compress_seconds: Own work before the last request was handed in.
        decompress_seconds: Own work after its reply.
        stamps: Every request, in order.
    """

    compress_seconds: float = 0.0
    decompress_seconds: float = 0.0
    stamps: list[Stamp] = field(default_factory=list)

    @property
    def wire_seconds(self) -> float:
        """Return the time of all requests together."""
        return sum(stamp.seconds for stamp in self.stamps)

    @property
    def wire_bytes(self) -> int:
        """Return the payload bytes of all requests together."""
        return sum(stamp.bytes for stamp in self.stamps)


class Wire:
    """Carries out requests on a process group with blocking calls.

    Every rank of the group must run the same rounds in the same order.

    Args:
        group: Process group that carries the gradients; used by this object alone.
    """

    emulated = False
    """Whether the link is emulated by delays; such a wire never takes the native path."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._preposts = dist.get_backend(group) == "gloo"

    def run(self, rounds: Rounds, option: Option, at: At) -> tuple[Estimate, Timing]:
        """Drive the rounds of one bucket to their end.

        Raises:
            RuntimeError: A collective failed or timed out; nothing may be assumed about payloads.
        """
        timing = Timing()
        mark = time.monotonic()
        try:
            request = next(rounds)
            while True:
                handed_in = time.monotonic()
                timing.compress_seconds += handed_in - mark
                reply = self._timed(request, option, at, timing)
                mark = time.monotonic()
                request = rounds.send(reply)
        except StopIteration as stop:
            self._synchronize()
            timing.decompress_seconds = time.monotonic() - mark
            estimate: Estimate = stop.value
            return estimate, timing

    def probe(self, payload: Tensor, step: int) -> float:
        """Return the seconds of one all-reduce of ``payload``; all ranks alike."""
        timing = Timing()
        at = At(rank=self.rank, world_size=self.world_size, step=step)
        self._timed(AllReduce(payload, skippable=False), Option(), at, timing)
        return timing.wire_seconds

    def _timed(self, request: Collective, option: Option, at: At, timing: Timing) -> Tensor:
        self._synchronize()
        start = time.monotonic()
        size = request.payload.nbytes
        kind, skip = request.kind, 0
        if isinstance(request, AllReduce) and not backend_carries(option, request):
            schedule = schedule_for(option, at, request)
            kind = option.collective if option.collective in SCHEDULES else "ring"
            skip = option.skip if schedule.omitted else 0
            run_steps(self.group, request.payload, schedule, request.reduction, self._preposts)
            reply = settle(option, at, schedule, request)
        else:
            reply = self._native(request)
        self._settle(kind, size, skip, at)
        self._synchronize()
        timing.stamps.append(Stamp(kind, size, skip, time.monotonic() - start))
        return reply

    def _native(self, request: Collective) -> Tensor:
        payload = request.payload
        if isinstance(request, AllReduce):
            operation = dist.ReduceOp.MAX if request.reduction is MAX else dist.ReduceOp.SUM
            dist.all_reduce(payload, operation, group=self.group)
            return payload
        if isinstance(request, AllGather):
            gathered = payload.new_empty(self.world_size * payload.numel())
            all_gather_flat(gathered, payload, group=self.group)
            return gathered.view(self.world_size, payload.numel())
        if isinstance(request, Broadcast):
            dist.broadcast(payload, group=self.group, group_src=request.source)
            return payload
        if isinstance(request, AllToAll):
            received = torch.empty_like(payload)
            dist.all_to_all_single(received, payload, group=self.group)
            return received.view(self.world_size, -1)
        assert isinstance(request, ReduceScatter)
        part = payload.new_empty(payload.numel() // self.world_size)
        reduce_scatter_flat(part, payload, group=self.group)
        return part

    def _settle(self, kind: str, size: int, skip: int, at: At) -> None:
        """Hook for an emulated link: called after every collective with what was carried."""

    def _synchronize(self) -> None:
        """Wait for the own stream, so that host clocks tell device time; nothing on the CPU."""
        if not self._preposts and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def communication_thread(device: torch.device) -> OrderedThread:
    """Return the thread that carries buckets out; on CUDA it works on a stream of its own."""

    def own_stream() -> None:
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(stream)

    set_up = own_stream if device.type == "cuda" else None
    return OrderedThread("gradpilot-communication", set_up)

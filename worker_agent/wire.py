"""The driver of compressors over a process group, and the thread that it blocks.

Collectives are issued from the hook itself or from this thread, in the order of the buckets, never
from the callback of a future: on gloo that aborts or deadlocks, since callbacks run in an order of
their own on every rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from gradpilot.protos.messages import UNSKIPPABLE, Option
from gradpilot.worker_agent.collectives.base import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
)
from gradpilot.worker_agent.collectives.reduction import MAX, SUM
from gradpilot.worker_agent.collectives.scatter import NAME as SCATTER_BROADCAST
from gradpilot.worker_agent.collectives.scatter import scatter_broadcast
from gradpilot.worker_agent.collectives.skipping import (
    backend_carries,
    schedule_for,
    settle,
    skipped_steps,
)
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.nodes import NodeTeams
from gradpilot.worker_agent.peers import run_steps
from gradpilot.worker_agent.threads import OrderedThread

# torch 2.13 calls them by other names and warns of the old ones; older ones know only those.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Stamp:
    """One request as it was carried out.

    Attributes:
        collective: One of ``messages.COLLECTIVES``, or with its scope: ``all_reduce across``.
        bytes: Payload bytes that this rank handed in.
        skip: Steps of our own all-reduce left out.
        seconds: From handing in to having the reply, as far as nothing before it was under way.
        overlapped: How long it had been under way beside the one before.
    """

    collective: str
    bytes: int
    skip: int
    seconds: float
    overlapped: float = 0.0


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
        self.teams: NodeTeams | None = None
        """Groups inside and across nodes; set where there are several of both."""
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
        if request.scope != "all":
            kind, reply = f"{request.kind} {request.scope}", self._layered(request, option, at)
        elif isinstance(request, AllReduce) and not backend_carries(option, request):
            kind = "ring" if option.collective in UNSKIPPABLE else option.collective
            skip = skipped_steps(option, self.world_size, request)
            reply = self._exchange(request, option, at, self.group)
        else:
            if isinstance(request, Broadcast) and option.collective not in UNSKIPPABLE:
                kind = SCATTER_BROADCAST
            reply = self._exchange(request, option, at, self.group)
        self._settle(kind, size, skip, at)
        self._synchronize()
        timing.stamps.append(Stamp(kind, size, skip, time.monotonic() - start))
        return reply

    def _layered(self, request: Collective, option: Option, at: At) -> Tensor:
        """Carry a request out inside the node, or across nodes by the leaders for all."""
        teams = self.teams
        assert teams is not None, "a layered option was compiled for a job of one layer"
        if request.scope == "node":
            return self._exchange(request, option, at, teams.inside)
        reply = _room_for_reply(request, teams.nodes.count)
        if teams.across is not None:
            there = replace(at, rank=teams.node, world_size=teams.nodes.count)
            reply.copy_(self._exchange(request, option, there, teams.across))
        dist.broadcast(reply, group=teams.inside, group_src=0)
        return reply

    def _exchange(
        self, request: Collective, option: Option, at: At, group: dist.ProcessGroup
    ) -> Tensor:
        payload = request.payload
        if isinstance(request, AllReduce):
            if not backend_carries(option, request):
                schedule = schedule_for(option, at, request)
                run_steps(group, payload, schedule, request.reduction, self._preposts)
                return settle(option, at, schedule, request)
            operation = dist.ReduceOp.MAX if request.reduction is MAX else dist.ReduceOp.SUM
            dist.all_reduce(payload, operation, group=group)
            return payload
        if isinstance(request, Broadcast):
            if option.collective in UNSKIPPABLE:
                dist.broadcast(payload, group=group, group_src=request.source)
            else:  # who carries all-reduces by messages of our own carries broadcasts so, too
                steps = scatter_broadcast(at.rank, at.world_size, request.source)
                run_steps(group, payload, steps, SUM, self._preposts)
            return payload
        reply = _room_for_reply(request, dist.get_world_size(group))
        if isinstance(request, AllGather):
            all_gather_flat(reply.view(-1), payload, group=group)
        elif isinstance(request, AllToAll):
            dist.all_to_all_single(reply.view(-1), payload, group=group)
        else:
            reduce_scatter_flat(reply, payload, group=group)
        return reply

    def _settle(self, kind: str, size: int, skip: int, at: At) -> None:
        """Hook for an emulated link: called after every collective with what was carried."""

    def _synchronize(self) -> None:
        """Wait for the own stream, so that host clocks tell device time; nothing on the CPU."""
        if not self._preposts and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _room_for_reply(request: Collective, world_size: int) -> Tensor:
    """Return an uninitialised tensor of the shape of a request's reply."""
    payload = request.payload
    if isinstance(request, AllGather):
        return payload.new_empty(world_size, payload.numel())
    if isinstance(request, AllToAll):
        return payload.new_empty(world_size, payload.numel() // world_size)
    if isinstance(request, ReduceScatter):
        return payload.new_empty(payload.numel() // world_size)
    return torch.empty_like(payload)


def communication_thread(device: torch.device) -> OrderedThread:
    """Return the thread that carries buckets out; on CUDA it works on a stream of its own."""

    def own_stream() -> None:
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(stream)

    set_up = own_stream if device.type == "cuda" else None
    return OrderedThread("gradpilot-communication", set_up)

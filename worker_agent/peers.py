"""Carries out a schedule of point-to-point messages on a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from gradpilot.worker_agent.collectives.base import Schedule, slice_bounds
from gradpilot.worker_agent.collectives.reduction import Reduction


def run_steps(
    group: dist.ProcessGroup,
    payload: Tensor,
    schedule: Schedule,
    reduction: Reduction,
    preposts: bool,
) -> None:
    """Do a rank's steps; all ranks of the group with matching schedules alike.

    Args:
        group: Process group.
        payload: 1-D contiguous tensor, reduced in place.
        schedule: This rank's schedule.
        reduction: How payloads combine.
        preposts: Whether receives are posted long before their messages come, as gloo likes.

    Raises:
        RuntimeError: A message failed or timed out; nothing may be assumed about the payload.
    """
    parts = _Parts(payload, schedule.slices)
    if preposts:
        _preposted(group, parts, schedule, reduction)
    else:
        _paired(group, parts, schedule, reduction)


class _Parts:
    """The slices of a payload, joined where they lie side by side in the order asked for."""

    def __init__(self, payload: Tensor, slices: int) -> None:
        self._payload = payload
        self._bounds = slice_bounds(payload.numel(), slices)

    def views(self, numbers: tuple[int, ...]) -> list[Tensor]:
        """Return views that together are these slices, without empty ones."""
        joined: list[slice] = []
        for number in numbers:
            part = self._bounds[number]
            if part.start == part.stop:
                continue
            if joined and joined[-1].stop == part.start:
                joined[-1] = slice(joined[-1].start, part.stop)
            else:
                joined.append(part)
        return [self._payload[part] for part in joined]


def _message(views: list[Tensor]) -> Tensor:
    """Return slices as one message: a view where they are one piece, else a copy."""
    return views[0] if len(views) == 1 else torch.cat(views)


def _deliver(message: Tensor, views: list[Tensor], reduction: Reduction, accumulate: bool) -> None:
    """Combine a message with its slices, or overwrite them."""
    start = 0
    for view in views:
        part = message[start : start + view.numel()]
        start += view.numel()
        if accumulate:
            reduction.combine_(view, part)
        elif view.data_ptr() != part.data_ptr():
            view.copy_(part)


def _preposted(
    group: dist.ProcessGroup, parts: _Parts, schedule: Schedule, reduction: Reduction
) -> None:
    """Post all receives first: gloo then needs no round trip to announce each of them.

    A gathered slice may be received in place: who holds its sum sends it only after this rank's own
    contribution, if any, has arrived, and a rank that contributes nothing never sends its own.
    """
    targets = [parts.views(step.receive) for step in schedule.steps]
    landing: list[Tensor | None] = []
    receives: list[dist.Work | None] = []
    for number, (step, views) in enumerate(zip(schedule.steps, targets, strict=True)):
        if not views:
            landing.append(None)
            receives.append(None)
            continue
        in_place = len(views) == 1 and not step.accumulate
        size = sum(view.numel() for view in views)
        message = views[0] if in_place else views[0].new_empty(size)
        landing.append(message)
        receives.append(dist.irecv(message, group=group, group_src=step.source, tag=number))
    sends = []
    for number, step in enumerate(schedule.steps):
        outgoing = parts.views(step.send)
        if outgoing:
            message = _message(outgoing)
            work = dist.isend(message, group=group, group_dst=step.to, tag=number)
            sends.append((work, message))  # the message must live until it is sent
        receive, arrived = receives[number], landing[number]
        if receive is not None and arrived is not None:
            receive.wait()
            _deliver(arrived, targets[number], reduction, step.accumulate)
    for work, _ in sends:
        if work is not None:
            work.wait()


def _paired(
    group: dist.ProcessGroup, parts: _Parts, schedule: Schedule, reduction: Reduction
) -> None:
    """Send and receive step by step: NCCL runs point-to-point calls in stream order."""
    for step in schedule.steps:
        targets, outgoing = parts.views(step.receive), parts.views(step.send)
        operations = []
        if outgoing:
            message = _message(outgoing)
            operations.append(dist.P2POp(dist.isend, message, group=group, group_peer=step.to))
        arrived: Tensor | None = None
        if targets:
            in_place = len(targets) == 1 and not step.accumulate
            size = sum(view.numel() for view in targets)
            arrived = targets[0] if in_place else targets[0].new_empty(size)
            operations.append(dist.P2POp(dist.irecv, arrived, group=group, group_peer=step.source))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        if arrived is not None:
            _deliver(arrived, targets, reduction, step.accumulate)

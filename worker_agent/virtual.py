"""Lockstep driver: N virtual ranks of a compressor in one process, without I/O.

Runs the same rounds as the driver over a process group and adds in the same order (a schedule slice
by slice and step by step; the backend's own all-reduce in rank order, in the payload's dtype), so
rounding, overflow and bytes are those of the real thing. For tests, the simulator and N to 1024.

Letters: N world size, n elements of the bucket.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradpilot.errors import ProtocolError
from gradpilot.protos.messages import DENSE, Option, WireRound
from gradpilot.worker_agent.collectives.base import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
    Schedule,
    Step,
)
from gradpilot.worker_agent.collectives.reduction import SUM, Reduction
from gradpilot.worker_agent.collectives.skipping import backend_carries, schedule_for, settle
from gradpilot.worker_agent.compressors.base import (
    NOTHING,
    At,
    Compressor,
    Estimate,
    Rounds,
    leave_residual_,
)
from gradpilot.worker_agent.nodes import Nodes
from gradpilot.worker_agent.plan import compile_option


@dataclass(frozen=True, slots=True)
class VirtualStep:
    """One step of one bucket on N virtual ranks; lists are by rank.

    Attributes:
        estimates: What the compressor ended with.
        residuals: New residuals, n elements each; the old ones if the mean is not finite.
        wire: Payload that one rank handed in, by round.
        memories: What the compressor remembers; the old ones if the mean is not finite.
    """

    estimates: list[Estimate]
    residuals: list[Tensor]
    wire: tuple[WireRound, ...]
    memories: list[Mapping[str, Tensor]]

    @property
    def mean(self) -> Tensor:
        """Return the estimated mean, which is the same on all ranks."""
        return self.estimates[0].mean


def run_lockstep(
    rounds: Sequence[Rounds],
    ats: Sequence[At],
    option: Option = DENSE,
    *,
    log: list[WireRound] | None = None,
    nodes: Nodes | None = None,
) -> list[Estimate]:
    """Drive the rounds of all ranks to their end and return their estimates, by rank.

    Args:
        rounds: Rounds of every rank; they are consumed.
        ats: Where each takes place.
        option: Who carries an all-reduce, and what it skips; the same for all ranks.
        log: Receives every request as one rank handed it in.
        nodes: Nodes by rank, for requests inside a node or across nodes.

    Raises:
        ProtocolError: A rank asks for something else than the others.
    """
    replies: Iterable[Tensor | None] = [None] * len(rounds)
    for number in itertools.count():
        answers = [_advance(r, reply) for r, reply in zip(rounds, replies, strict=True)]
        _check_alike(answers, number)
        estimates = [a for a in answers if isinstance(a, Estimate)]
        if estimates:
            return estimates
        requests = [a for a in answers if not isinstance(a, Estimate)]
        if log is not None:
            first = requests[0]
            skippable = getattr(first, "skippable", True)
            log.append(WireRound(first.kind, first.payload.nbytes, skippable))
        replies = _carry_out_scoped(requests, ats, option, nodes)
    raise AssertionError("unreachable")


def virtual_step(
    option: Option,
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None = None,
    *,
    step: int = 0,
    bucket: str = "",
    seed: int = 0,
    shapes: tuple[torch.Size, ...] = (),
    compressor: Compressor | None = None,
    nodes: Nodes | None = None,
    memories: Sequence[Mapping[str, Tensor]] | None = None,
) -> VirtualStep:
    """Do on N virtual ranks what the hook does with one bucket, error feedback included.

    Args:
        option: Option of the bucket.
        grads: Gradient of every rank, 1-D, n elements; not changed.
        residuals: Residual of every rank; None for the first step.
        step: See ``At``.
        bucket: See ``At``.
        seed: See ``At``.
        shapes: See ``At``.
        compressor: Used instead of the one that ``option`` names.
        nodes: See ``run_lockstep``.
        memories: ``VirtualStep.memories`` of the step before, of the same compressor.

    Raises:
        ConfigError: The option cannot be used.
        ProtocolError: Ranks ask for different things.
    """
    compressor = compressor or compile_option(option, len(grads), nodes).compressor
    before = residuals if residuals is not None else [torch.zeros_like(g) for g in grads]
    corrected = [g + r for g, r in zip(grads, before, strict=True)]
    for c in corrected:
        if not bool(c.isfinite().all()):
            c.fill_(torch.nan)
    known = list(memories) if memories is not None else [NOTHING] * len(grads)
    ats = [
        At(rank, len(grads), step, bucket, seed, shapes, memory=known[rank])
        for rank in range(len(grads))
    ]
    log: list[WireRound] = []
    rounds = [compressor.rounds(c, at) for c, at in zip(corrected, ats, strict=True)]
    estimates = run_lockstep(rounds, ats, option, log=log, nodes=nodes)
    if bool(estimates[0].mean.isfinite().all()):
        after = [leave_residual_(c, e) for c, e in zip(corrected, estimates, strict=True)]
        known = [e.memory for e in estimates]
    else:
        after = list(before)
    return VirtualStep(estimates, after, tuple(log), known)


def _advance(rounds: Rounds, reply: Tensor | None) -> Collective | Estimate:
    try:
        return next(rounds) if reply is None else rounds.send(reply)
    except StopIteration as stop:
        estimate: Estimate = stop.value
        return estimate


def _description(answer: Collective | Estimate) -> str:
    """Return in words what must be the same on all ranks."""
    if isinstance(answer, Estimate):
        return "the end"
    words = f"{answer.kind} of {answer.payload.numel()} {answer.payload.dtype}"
    if isinstance(answer, Broadcast):
        words += f" from rank {answer.source}"
    if isinstance(answer, AllReduce) and not answer.skippable:
        words += " (not skippable)"
    if isinstance(answer, AllReduce) and answer.reduction is not SUM:
        words += f" by {answer.reduction.name}"
    return words


def _check_alike(answers: Sequence[Collective | Estimate], number: int) -> None:
    descriptions = [_description(a) for a in answers]
    usual, _ = Counter(descriptions).most_common(1)[0]
    odd = [f"rank {r} asks for {d}" for r, d in enumerate(descriptions) if d != usual]
    if odd:
        raise ProtocolError(
            f"round {number}: most ranks ask for {usual}, but {'; '.join(odd[:4])};"
            " all ranks need the same option, bucket and step"
        )


def _carry_out_scoped(
    requests: Sequence[Collective], ats: Sequence[At], option: Option, nodes: Nodes | None
) -> Iterable[Tensor]:
    """Return the reply of every rank; inside nodes, or across nodes by the leaders for all."""
    if requests[0].scope == "all":
        return _carry_out(requests, ats, option)
    assert nodes is not None, "a layered option needs nodes"
    replies: list[Tensor] = [request.payload for request in requests]
    if requests[0].scope == "node":
        for node in range(nodes.count):
            members = nodes.members(node)
            inside = _carry_out([requests[r] for r in members], [ats[r] for r in members], option)
            for rank, reply in zip(members, inside, strict=True):
                replies[rank] = reply
        return replies
    leaders = nodes.leaders()
    there = [replace(ats[r], rank=node, world_size=nodes.count) for node, r in enumerate(leaders)]
    across = _carry_out([requests[r] for r in leaders], there, option)
    for node, reply in enumerate(list(across)):
        for rank in nodes.members(node):
            replies[rank] = reply.clone()
    return replies


def _carry_out(
    requests: Sequence[Collective], ats: Sequence[At], option: Option
) -> Iterable[Tensor]:
    """Return the reply of every rank."""
    payloads = [request.payload for request in requests]
    first = requests[0]
    if isinstance(first, AllGather):
        gathered = torch.stack(payloads)
        # Copied when taken: N x N payloads need not exist at once.
        return (gathered.clone() for _ in requests)
    if isinstance(first, Broadcast):
        source = payloads[first.source].clone()
        return [payload.copy_(source) for payload in payloads]
    if isinstance(first, AllToAll):
        parts = torch.stack(payloads).view(len(payloads), len(payloads), -1)
        return [parts[:, rank].clone() for rank in range(len(payloads))]
    if isinstance(first, ReduceScatter):
        summed = _in_rank_order(payloads, SUM).view(len(payloads), -1)
        return [summed[rank].clone() for rank in range(len(payloads))]
    reduces = [request for request in requests if isinstance(request, AllReduce)]
    if backend_carries(option, reduces[0]):
        total = _in_rank_order(payloads, reduces[0].reduction)
        return [payload.copy_(total) for payload in payloads]
    schedules = [schedule_for(option, at, r) for at, r in zip(ats, reduces, strict=True)]
    run_schedules(payloads, schedules, reduces[0].reduction)
    return [settle(option, at, s, r) for at, s, r in zip(ats, schedules, reduces, strict=True)]


def _in_rank_order(payloads: Sequence[Tensor], reduction: Reduction) -> Tensor:
    total = payloads[0].clone()
    for payload in payloads[1:]:
        reduction.combine_(total, payload)
    return total


def run_schedules(
    payloads: Sequence[Tensor], schedules: Sequence[Schedule], reduction: Reduction = SUM
) -> None:
    """Carry out the schedules of all ranks on their payloads, in place.

    All ranks do a step at once, over a ``(N, slices, length)`` tensor; the order of combinations of
    an element is that of the schedule.

    Args:
        payloads: Payload of every rank, same numel and dtype.
        schedules: Schedule of every rank.
        reduction: How payloads combine.

    Raises:
        ProtocolError: A rank expects slices that its source does not send then.
    """
    n, slices = payloads[0].numel(), schedules[0].slices
    length = -(-n // slices)  # as ``slice_bounds`` cuts; padding stays zero
    held = payloads[0].new_zeros(len(payloads), slices * length)
    for rank, payload in enumerate(payloads):
        held[rank, :n] = payload
    held = held.view(len(payloads), slices, length)
    for steps in zip(*(schedule.steps for schedule in schedules), strict=True):
        _do_step(held, steps, reduction)
    held = held.view(len(payloads), -1)
    for rank, payload in enumerate(payloads):
        payload.copy_(held[rank, :n])


def _do_step(held: Tensor, steps: Sequence[Step], reduction: Reduction) -> None:
    """Do one step of all ranks: everything is read before anything is written."""
    # Index lists over (rank, slice); ranks of one step may move different numbers of slices.
    sources: list[int] = []
    sent: list[int] = []
    targets: list[int] = []
    received: list[int] = []
    accumulate = [step.accumulate for step in steps if step.receive]
    for rank, step in enumerate(steps):
        if not step.receive:
            continue
        peer = steps[step.source]
        if (peer.to, peer.send) != (rank, step.receive):
            raise ProtocolError(
                f"rank {rank} expects slices {step.receive} from rank {step.source},"
                f" which sends slices {peer.send} to rank {peer.to}"
            )
        sources += [step.source] * len(peer.send)
        sent += peer.send
        targets += [rank] * len(step.receive)
        received += step.receive
    expected = sum(len(step.send) for step in steps)
    if len(sources) != expected:
        raise ProtocolError(f"{expected} slices are sent in a step, but {len(sources)} received")
    if not sources:
        return
    if len(set(accumulate)) > 1:
        raise ProtocolError("some ranks reduce in a step in which others gather")
    incoming = held[torch.tensor(sources), torch.tensor(sent)]
    where = (torch.tensor(targets), torch.tensor(received))
    if accumulate[0]:
        # The own part first: the order in which a real rank combines.
        held[where] = reduction.combine_(held[where], incoming)
    else:
        held[where] = incoming

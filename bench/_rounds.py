"""One rank's part of a compressor, replayed: with the replies that all ranks together gave."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradpilot.worker_agent.collectives.base import AllReduce, Broadcast
from gradpilot.worker_agent.compressors.base import (
    NOTHING,
    At,
    Compressor,
    Estimate,
    Rounds,
    option_of,
)
from gradpilot.worker_agent.virtual import run_lockstep


@dataclass(frozen=True)
class Rehearsal:
    """What rank 0 needs to run a compressor by itself.

    Attributes:
        compressor: The compressor.
        at: Where rank 0 takes part.
        replies: Replies to its requests.
        wire_bytes: Bytes that it handed in.
    """

    compressor: Compressor
    at: At
    replies: tuple[Tensor, ...]
    wire_bytes: int

    def run(self, grad: Tensor, out: Tensor) -> tuple[Estimate, float, float]:
        """Return the estimate, and the seconds to compress and to decompress.

        Args:
            grad: Gradient of rank 0; overwritten by a compressor that sends everything.
            out: Where the mean goes, as the hook gives the bucket's own buffer.
        """
        spans = []
        rounds = self.compressor.rounds(grad, replace(self.at, out=out))
        begun = time.perf_counter()
        try:
            request = next(rounds)
            spans.append(time.perf_counter() - begun)
            for recorded in self.replies:
                if isinstance(request, AllReduce | Broadcast):  # as drivers do
                    reply = request.payload.copy_(recorded)
                else:
                    reply = recorded.clone()
                begun = time.perf_counter()
                request = rounds.send(reply)
                spans.append(time.perf_counter() - begun)
        except StopIteration as stop:
            return stop.value, sum(spans), time.perf_counter() - begun
        raise RuntimeError(f"{self.compressor} asks for more than in its rehearsal")


def rehearse(
    compressor: Compressor, grads: Sequence[Tensor], shapes: tuple[torch.Size, ...]
) -> Rehearsal:
    """Run two steps on all ranks and record what rank 0 gets in the second one.

    The second, so that a compressor which remembers something has something to remember.
    """
    memories: list[Mapping[str, Tensor]] = [NOTHING] * len(grads)
    for step in range(2):
        ats = [
            At(
                rank,
                len(grads),
                step,
                shapes=shapes,
                feedback=not compressor.lossless,
                memory=memories[rank],
            )
            for rank in range(len(grads))
        ]
        replies: list[Tensor] = []
        sizes: list[int] = []
        rounds = [compressor.rounds(g.clone(), at) for g, at in zip(grads, ats, strict=True)]
        rounds[0] = _recorded(rounds[0], replies, sizes)
        option = option_of(compressor, compressor.collectives[0])
        memories = [e.memory for e in run_lockstep(rounds, ats, option)]
    return Rehearsal(compressor, ats[0], tuple(replies), sum(sizes))


def _recorded(rounds: Rounds, replies: list[Tensor], sizes: list[int]) -> Rounds:
    """Pass requests and replies on and note them."""
    try:
        request = next(rounds)
        while True:
            sizes.append(request.payload.nbytes)
            reply = yield request
            replies.append(reply.clone())
            request = rounds.send(reply)
    except StopIteration as stop:
        estimate: Estimate = stop.value
        return estimate

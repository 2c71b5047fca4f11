"""Dense inside a node, the compressor across nodes.

Links inside a node are often ten times faster than those between nodes, so that compressing for
them costs more than it saves. Ranks of a node first add up their gradients; then the nodes run the
compressor, each as if it were one rank. Only the node's leader talks to other nodes; it passes
every reply on, and the other ranks of the node compute the same from it.

The residual of a node is kept by each of its ranks, in equal parts: so nothing needs to be moved,
and it is not lost when the bucket goes to another option.

Letters: N ranks, K nodes, m ranks of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors._precision import precise_dtype
from gradpilot.worker_agent.compressors.base import (
    At,
    Compressor,
    Estimate,
    Rounds,
    leave_residual_,
)
from gradpilot.worker_agent.nodes import Nodes


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Compressor):
    """A compressor whose ranks are the nodes of a job.

    Attributes:
        inner: What runs across nodes.
        nodes: Nodes by rank.
    """

    name: ClassVar[str] = "hierarchical"

    inner: Compressor
    nodes: Nodes

    def __post_init__(self) -> None:
        if not self.nodes.layered:
            raise ConfigError(
                "hierarchical needs several nodes with several ranks on one of them, got"
                f" {len(self.nodes.of)} ranks on {self.nodes.count} node(s)"
            )
        self.inner.check(self.nodes.count, "hierarchical")

    @classmethod
    def ladder(cls) -> Sequence[Hierarchical]:
        """Return nothing: it is made from an option, never tried by itself."""
        return ()

    @property
    def ratio(self) -> float:
        """Return the inner ratio."""
        return self.inner.ratio

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return one fp32 all-reduce inside the node, then the rounds across nodes."""
        inside = WireRound("all_reduce", 4 * n, skippable=False)
        return (inside, *self.inner.wire(n, shapes, self.nodes.count))

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Add up inside the node, run the inner rounds across nodes."""
        nodes = self.nodes
        node = nodes.of[at.rank]
        # K / N of each, so that the mean over nodes is the mean over ranks, also of uneven nodes.
        weight = nodes.count / at.world_size
        precise = precise_dtype(grad)
        total = yield AllReduce(grad.to(precise) * weight, skippable=False, scope="node")

        out = at.out if grad.dtype == precise else None
        there = replace(at, rank=node, world_size=nodes.count, divide=False, out=out)
        rounds = self.inner.rounds(total, there)
        try:
            request = next(rounds)
            while True:
                request.scope = "across"
                request = rounds.send((yield request))
        except StopIteration as stop:
            estimate: Estimate = stop.value

        mean = estimate.mean
        if mean is not at.out:
            mean = at.room(grad).copy_(mean)
        if self.inner.lossless or not at.feedback:
            return Estimate(mean, None)
        # What the node did not send, divided among its m ranks so that the weights give it back.
        left = leave_residual_(total, estimate).div_(weight * len(nodes.members(node)))
        return Estimate(mean, grad - left, memory=estimate.memory)

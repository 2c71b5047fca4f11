"""The two halves of a ring for shards that stay where they are, and what skipping leaves out.

A ring all-reduce may rotate which rank ends with which slice; with sharded parameters rank r owns
shard r. So here the *order* of the ranks on the ring varies instead. Position p of the ring sends
to p + 1. A reduce-scatter without its first S steps leaves position p with the sum of its own shard
over all but S ranks, and p itself does not contribute to the shards of positions p - 1 .. p - S.

The all-gather of the parameters runs the other way round: from p + 1, then p + 2, ... Without its
last S steps position p does not receive the shards of exactly those positions p - 1 .. p - S. So a
rank that works with old weights of some shards keeps its gradients of these shards to itself
(alignment as in the code published with SkipReduce, MICRO 2025).

Letters: N ranks, S skipped steps, p position, 0 <= S <= N - 1.
"""

from __future__ import annotations

import torch

from gradpilot.worker_agent.collectives.base import Schedule, Step
from gradpilot.worker_agent.compressors.base import At


def ring_order(at: At, rotation: str) -> tuple[int, ...]:
    """Return the ranks in the order of the ring, the same on all of them.

    Args:
        at: Where this takes place; step, unit and seed determine the order.
        rotation: ``random``, or ``static`` for 0 .. N - 1 at every step.
    """
    if rotation == "static":
        return tuple(range(at.world_size))
    generator = at.generator("ring order")
    return tuple(torch.randperm(at.world_size, generator=generator).tolist())


def omitted_shards(order: tuple[int, ...], rank: int, skip: int) -> tuple[int, ...]:
    """Return the shards to which a rank contributes nothing, and whose weights it does not get."""
    p = order.index(rank)
    return tuple(order[(p - t) % len(order)] for t in range(1, skip + 1))


def scatter_schedule(order: tuple[int, ...], rank: int, skip: int) -> Schedule:
    """Return a rank's steps of a reduce-scatter; its own slice then holds the sum.

    Args:
        order: Ranks in the order of the ring.
        rank: This rank.
        skip: Steps S to leave out.
    """
    n, p = len(order), order.index(rank)

    def step(t: int) -> Step:
        send, receive = order[(p - t) % n], order[(p - t - 1) % n]
        return Step(order[(p + 1) % n], (send,), order[(p - 1) % n], (receive,), accumulate=True)

    steps = tuple(step(t) for t in range(skip + 1, n))
    return Schedule(n, steps, omitted_shards(order, rank, skip), n - skip)


def gather_schedule(order: tuple[int, ...], rank: int, skip: int) -> Schedule:
    """Return a rank's steps of an all-gather; what it does not receive stays as it was.

    Args:
        order: Ranks in the order of the ring.
        rank: This rank.
        skip: Steps S to leave out.
    """
    n, p = len(order), order.index(rank)

    def step(t: int) -> Step:
        send, receive = order[(p + t) % n], order[(p + t + 1) % n]
        return Step(order[(p - 1) % n], (send,), order[(p + 1) % n], (receive,), accumulate=False)

    steps = tuple(step(t) for t in range(n - 1 - skip))
    return Schedule(n, steps, omitted_shards(order, rank, skip), n - skip)

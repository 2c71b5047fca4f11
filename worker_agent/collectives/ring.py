"""Ring all-reduce that can skip reduce-scatter steps (SkipReduce, MICRO 2025).

Rank r sends to r + 1. Virtual position v = (r + shift) mod N. A reduce-scatter of N - 1 steps
leaves slice v summed on position v; leaving out its first S steps leaves S contributions out of
every slice, and saves their time: 2(N - 1) - S steps of 1/N of the payload remain. An all-gather of
N - 1 steps follows, always in full.

Slice c sums positions c + 1 + S .. c + N - 1 and c, so position v omits slices v - 1 .. v - S. With
a fixed shift the same parts of a rank's gradient are never heard: rotate it.

Letters: N world size, S skipped steps.
"""

from __future__ import annotations

from functools import lru_cache

from gradpilot.worker_agent.collectives.base import SCHEDULES, Algorithm, Schedule, Step


def ring(rank: int, world_size: int, *, skip: int = 0, shift: int = 0) -> Schedule:
    """Return the schedule of ``rank``; see ``ScheduleBuilder``."""
    return _ring(rank, world_size, min(max(skip, 0), most_skipped(world_size)), shift % world_size)


def most_skipped(world_size: int) -> int:
    """Return N - 1: then nothing is summed, and every rank publishes one slice of its own."""
    return world_size - 1


SCHEDULES.register("ring")(
    Algorithm(ring, most_skipped, "Kasan et al., SkipReduce, MICRO 2025; textbook ring for S = 0")
)


# A bucket meets at most N shifts, step after step.
@lru_cache(maxsize=128)
def _ring(rank: int, world_size: int, skip: int, shift: int) -> Schedule:
    v = (rank + shift) % world_size
    following, preceding = (rank + 1) % world_size, (rank - 1) % world_size

    def step(t: int, accumulate: bool) -> Step:
        send, receive = (v - t) % world_size, (v - t - 1) % world_size
        return Step(following, (send,), preceding, (receive,), accumulate)

    reduce_scatter = [step(t, accumulate=True) for t in range(skip + 1, world_size)]
    all_gather = [step(t, accumulate=False) for t in range(world_size - 1)]
    return Schedule(
        slices=world_size,
        steps=(*reduce_scatter, *all_gather),
        omitted=tuple((v - t) % world_size for t in range(1, skip + 1)),
        contributions=world_size - skip,
    )

"""Broadcast by scatter and all-gather: nobody sends the whole payload more than twice.

A tree sends whole payloads, several from the rank at its root; on gloo they share that rank's
uplink, so that a broadcast costs more than an all-reduce. Here the source sends every other rank
one slice, and the slices then travel around a ring. Position v = (rank - source) mod N; the source
at position 0 has all slices and is sent none, so position N - 1 sends nothing.

The source sends (N - 1) / N of the payload in each half, another rank at most that in the second
half. Nothing is combined, so it works for any dtype.

Van de Geijn's broadcast of long messages (from memory), with all slices sent straight from the
source instead of down a tree: gloo sends them side by side.

Letters: N world size, v position.
"""

from __future__ import annotations

from functools import lru_cache

from gradpilot.worker_agent.collectives.base import Schedule, Step

NAME = "scatter_broadcast"
"""What it is called where collectives are timed."""


# A source changes with the step at most, so there are N of them.
@lru_cache(maxsize=128)
def scatter_broadcast(rank: int, world_size: int, source: int) -> Schedule:
    """Return the schedule of a rank; what ranks but the source bring is overwritten.

    Args:
        rank: This rank.
        world_size: Ranks N.
        source: Whose payload all shall have, the same on all ranks.
    """
    v = (rank - source) % world_size
    last = world_size - 1
    following, preceding = (rank + 1) % world_size, (rank - 1) % world_size

    def scatter(to: int) -> Step:
        sent = (to,) if v == 0 else ()
        received = (to,) if v == to else ()
        return Step((source + to) % world_size, sent, source, received, accumulate=False)

    def gather(t: int) -> Step:
        sent = ((v - t) % world_size,) if v != last else ()
        received = ((v - t - 1) % world_size,) if v != 0 else ()
        return Step(following, sent, preceding, received, accumulate=False)

    steps = [scatter(to) for to in range(1, world_size)]
    steps += [gather(t) for t in range(last)]
    return Schedule(
        slices=world_size,
        steps=tuple(steps),
        omitted=() if v == 0 else tuple(range(world_size)),
        contributions=1,
    )

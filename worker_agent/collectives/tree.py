"""Binomial trees, one for each slice, that can prune their lowest levels.

A tree adds up in ceil(log2 N) steps, but a payload that climbs one tree as a whole crosses the same
links again and again. Here every slice has a tree of its own, rotated by its number, so that all
ranks are busy at every level, no rank sends more than in a reduce-scatter, and N need be no power
of two.

Position v = (rank + shift) mod N has label w = (v - c) mod N in the tree with its root at position
c. At level l, labels that are odd multiples of 2^l send to w - 2^l. So a rank has the same two
peers for all slices of a level: it reduces towards rank - 2^l and publishes towards rank + 2^l.
Slices are numbered such that those of one message lie side by side, if N is a power of two, or are
few pieces.

Pruning the lowest j levels (our construction) leaves the contributions of labels that are multiples
of 2^j, which is ceil(N / 2^j) of them for every slice, and saves j steps and their messages. Who is
a leaf differs from slice to slice and rotates with the shift. The way down is always in full: an
omitted contribution is omitted from the sum only.

Textbook trees; the rotation makes of them the exchange pattern of Bruck et al., IEEE TPDS 1997
(from memory).

Letters: N world size, j skipped levels, l level, v position, w label, c position of a root.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gradpilot.worker_agent.collectives.base import SCHEDULES, Algorithm, Schedule, Step


def tree(rank: int, world_size: int, *, skip: int = 0, shift: int = 0) -> Schedule:
    """Return the schedule of ``rank``; see ``ScheduleBuilder``."""
    return _tree(rank, world_size, min(max(skip, 0), most_skipped(world_size)), shift % world_size)


def most_skipped(world_size: int) -> int:
    """Return ceil(log2 N): then nothing is summed, and every rank publishes a slice of its own."""
    return (world_size - 1).bit_length()


SCHEDULES.register("tree")(
    Algorithm(tree, most_skipped, "binomial trees, textbook; rotation and pruning are our own")
)


# A bucket meets at most N shifts, step after step.
@lru_cache(maxsize=128)
def _tree(rank: int, world_size: int, skip: int, shift: int) -> Schedule:
    v = (rank + shift) % world_size
    labels = [(v - root) % world_size for root in _roots(range(world_size))]

    up, down = [], []
    for level in range(most_skipped(world_size)):
        reach = 1 << level
        before, after = (rank - reach) % world_size, (rank + reach) % world_size
        # What this rank passes up at this level, and what it is passed.
        odd, even = [], []
        for number, w in enumerate(labels):
            if w % (2 * reach) == reach:
                odd.append(number)
            elif w % (2 * reach) == 0 and w + reach < world_size:
                even.append(number)
        up.append(Step(before, tuple(odd), after, tuple(even), accumulate=True))
        down.append(Step(after, tuple(even), before, tuple(odd), accumulate=False))

    return Schedule(
        slices=world_size,
        steps=(*up[skip:], *reversed(down)),
        omitted=tuple(number for number, w in enumerate(labels) if w % (1 << skip)),
        contributions=len(range(0, world_size, 1 << skip)),
    )


def _roots(positions: Sequence[int]) -> list[int]:
    """Return the root of every slice: sorted by the lowest bit, those alike by the next one, ..."""
    if len(positions) < 3:
        return list(positions)
    return [*_roots(positions[::2]), *_roots(positions[1::2])]

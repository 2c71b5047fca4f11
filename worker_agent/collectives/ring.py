"""Ring all-reduce that can skip reduce-scatter steps (SkipReduce, MICRO 2025).

Rank r sends to r + 1. Virtual position v = (r + shift) mod N. A reduce-scatter of N - 1 steps
leaves slice v summed on position v; leaving out its first S steps leaves S contributions out of
every slice, and saves their time: 2(N - 1) - S steps of 1/N of the payload remain. An all-gather of
N - 1 steps follows, always in full.

Slice c sums positions c + 1 + S .. c + N - 1 and c, so position v omits slices v - 1 .. v - S. With
a fixed shift the same parts of a rank's gradient are never heard: rotate it.

Letters: N world size, S skipped steps, n elements of a payload.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import (
    SCHEDULES,
    AllReduce,
    Schedule,
    Step,
    slice_bounds,
)
from gradpilot.worker_agent.compressors.base import At

MIN_SKIP_ELEMENTS = 1024
"""Payloads below this many elements are never skipped.

The published code spares tensors below 100,000 elements, because that is how it protects control
tensors and biases. Here a request says itself that it must not be skipped, and a bucket holds many
parameters, so the floor only spares payloads whose steps cost latency and no bandwidth.
"""


@SCHEDULES.register("ring")
def ring(rank: int, world_size: int, *, skip: int = 0, shift: int = 0) -> Schedule:
    """Return the schedule of ``rank``; see ``ScheduleBuilder``."""
    return _ring(rank, world_size, min(max(skip, 0), world_size - 1), shift % world_size)


# A bucket meets at most N shifts, step after step.
@lru_cache(maxsize=128)
def _ring(rank: int, world_size: int, skip: int, shift: int) -> Schedule:
    v = (rank + shift) % world_size
    following, preceding = (rank + 1) % world_size, (rank - 1) % world_size

    def step(t: int, accumulate: bool) -> Step:
        send, receive = (v - t) % world_size, (v - t - 1) % world_size
        return Step(following, send, preceding, receive, accumulate)

    reduce_scatter = [step(t, accumulate=True) for t in range(skip + 1, world_size)]
    all_gather = [step(t, accumulate=False) for t in range(world_size - 1)]
    return Schedule(
        slices=world_size,
        steps=(*reduce_scatter, *all_gather),
        omitted=tuple((v - t) % world_size for t in range(1, skip + 1)),
        contributions=world_size - skip,
    )


def min_skip_elements(world_size: int) -> int:
    """Return how many elements a payload needs for steps to be skipped.

    From N (N - 1) elements on no slice is empty, so every rank contributes a real element under any
    skip and shift, and a NaN on one rank reaches all.
    """
    return max(MIN_SKIP_ELEMENTS, world_size * (world_size - 1))


def plan_ring(option: Option, at: At, request: AllReduce) -> Schedule:
    """Return this rank's schedule for an all-reduce that the backend does not carry itself.

    Args:
        option: The bucket's option; its collective names the schedule.
        at: Where this takes place; ranks that differ in ``at.rank`` only get a matching set.
        request: The request; a small or unskippable one runs all steps.
    """
    spared = request.payload.numel() < min_skip_elements(at.world_size)
    skip = option.skip if request.skippable and not spared else 0
    shift = at.random("rotation") % at.world_size if skip and option.rotation == "random" else 0
    return SCHEDULES.get(option.collective)(at.rank, at.world_size, skip=skip, shift=shift)


def omitted_parts(schedule: Schedule, numel: int) -> tuple[slice, ...]:
    """Return the parts of a payload that this rank does not contribute, ascending."""
    bounds = slice_bounds(numel, schedule.slices)
    parts = (bounds[number] for number in sorted(schedule.omitted))
    return tuple(part for part in parts if part.start < part.stop)


def settle_ring(option: Option, schedule: Schedule, request: AllReduce) -> Tensor:
    """Do what a driver owes an all-reduce whose steps have run, and return the reply.

    With ``skip_feedback`` the request learns what this rank omitted. With divisor ``drop`` the sum
    of N - S contributions, divided by N beforehand, is scaled by N / (N - S).

    Args:
        option: The bucket's option.
        schedule: The schedule that ran.
        request: The request that it carried; its payload holds the sum, which is scaled in place.
    """
    total = request.payload
    if option.skip_feedback:
        request.omitted = omitted_parts(schedule, total.numel())
    if option.divisor == "drop" and schedule.omitted:
        total.mul_(schedule.slices / schedule.contributions)
    return total

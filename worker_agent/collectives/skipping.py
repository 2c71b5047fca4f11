"""What a schedule skips on one request, and what a driver owes the request afterwards."""

from __future__ import annotations

from torch import Tensor

from gradpilot.protos.messages import UNSKIPPABLE, Option
from gradpilot.worker_agent.collectives.base import SCHEDULES, AllReduce, Schedule, slice_bounds
from gradpilot.worker_agent.compressors.base import At

MIN_SKIP_ELEMENTS = 1024
"""Payloads below this many elements are never skipped.

The published code spares tensors below 100,000 elements, because that is how it protects control
tensors and biases. Here a request says itself that it must not be skipped, and a bucket holds many
parameters, so the floor only spares payloads whose steps cost latency and no bandwidth.
"""


def min_skip_elements(world_size: int) -> int:
    """Return how many elements a payload needs for steps to be skipped.

    From N (N - 1) elements on no slice is empty, so every rank contributes a real element under any
    skip and shift, and a NaN on one rank reaches all.
    """
    return max(MIN_SKIP_ELEMENTS, world_size * (world_size - 1))


def backend_carries(option: Option, request: AllReduce) -> bool:
    """Return whether an all-reduce is left to the backend instead of a schedule of ours.

    Raises:
        UnknownNameError: The option names no collective.
    """
    if option.collective in UNSKIPPABLE:
        return request.reduction.native
    SCHEDULES.get(option.collective)
    return False


def skipped_steps(option: Option, world_size: int, request: AllReduce) -> int:
    """Return how many steps of a schedule are left out: none of a small or unskippable request."""
    spared = request.payload.numel() < min_skip_elements(world_size)
    return option.skip if request.skippable and not spared else 0


def schedule_for(option: Option, at: At, request: AllReduce) -> Schedule:
    """Return this rank's schedule for an all-reduce that the backend does not carry itself.

    Args:
        option: The bucket's option; its collective names the schedule. The ring stands in for a
            backend that lacks a reduction.
        at: Where this takes place; ranks that differ in ``at.rank`` only get a matching set.
        request: The request; a small or unskippable one runs all steps.
    """
    skip = skipped_steps(option, at.world_size, request)
    shift = at.random("rotation") % at.world_size if skip and option.rotation == "random" else 0
    name = "ring" if option.collective in UNSKIPPABLE else option.collective
    return SCHEDULES.get(name).build(at.rank, at.world_size, skip=skip, shift=shift)


def omitted_parts(schedule: Schedule, numel: int) -> tuple[slice, ...]:
    """Return the parts of a payload that this rank does not contribute, ascending."""
    bounds = slice_bounds(numel, schedule.slices)
    parts = (bounds[number] for number in sorted(schedule.omitted))
    return tuple(part for part in parts if part.start < part.stop)


def settle(option: Option, at: At, schedule: Schedule, request: AllReduce) -> Tensor:
    """Do what a driver owes an all-reduce whose steps have run, and return the reply.

    With ``skip_feedback`` the request learns what this rank omitted. What N - S contributions, each
    divided by N beforehand, add up to is scaled: not at all by divisor ``skip``, by N / (N - S) by
    ``drop`` (the mean of those heard, unbiased), by ``shrink`` N / (N - S) times the option's
    ``shrink`` factor.

    Args:
        option: The bucket's option.
        at: Where this takes place.
        schedule: The schedule that ran.
        request: The request that it carried; its payload holds the sum, which is scaled in place.
    """
    total = request.payload
    if option.skip_feedback:
        request.omitted = omitted_parts(schedule, total.numel())
    if option.divisor != "skip" and schedule.contributions < at.world_size:
        factor = at.world_size / schedule.contributions
        total.mul_(factor * option.shrink if option.divisor == "shrink" else factor)
    return total

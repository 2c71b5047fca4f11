"""Whether what a decision sees can be believed, or should be seen twice first.

One window in which a rank stood still, was swapped out or reported nonsense must not move a plan.
So values that no plan changes (compute, waiting, the link, the overlap) may jump only if the next
look agrees: that delays the answer to a real change of more than ``JUMPS`` by one decision and
leaves smaller ones alone. Impossible numbers are never acted on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gradpilot.policies.base import BucketState, Inputs
from gradpilot.policies.cost import coefficients
from gradpilot.policies.watches import Look
from gradpilot.protos.messages import LinkEstimate

JUMPS = (2.0, 3.0, 3.0)
"""Factors between two looks beyond which a value must be seen twice, in the order of ``NAMES``.
Links do change by a factor of two, and the answer to that must not wait."""

SHARE = 0.1
"""Share of a dense step's compute and wire time below which a difference does not matter."""

NAMES = ("compute time", "wire time of a dense step", "time in which buckets become ready")
"""What ``values`` holds."""


class Belief(NamedTuple):
    """What a look is worth.

    ``believed`` and ``doubted`` are those of ``Look``; ``doubt`` says why the plan must be kept,
    empty if nothing speaks against a switch.
    """

    believed: tuple[float, ...]
    doubted: tuple[float, ...]
    doubt: str


def values(inputs: Inputs, link: LinkEstimate, straggle_seconds: float) -> tuple[float, ...]:
    """Return what no plan changes, seconds in the order of ``NAMES``.

    Args:
        inputs: What is known.
        link: The link as it is now.
        straggle_seconds: What waiting for slower ranks adds to every plan.
    """
    alphas, payloads = coefficients("all_reduce", inputs.world_size, 0, inputs.backend)
    wire = (
        alphas * len(inputs.layout.buckets) * link.alpha_seconds
        + payloads * 4.0 * inputs.layout.elements * link.beta_seconds_per_byte
    )
    ready = max((b.ready_seconds for b in inputs.buckets), default=0.0)
    return (inputs.compute_seconds + straggle_seconds, wire, ready)


def believe(before: Look, seen: tuple[float, ...], buckets: tuple[BucketState, ...]) -> Belief:
    """Return whether a look may move the plan.

    Args:
        before: The look before.
        seen: ``values`` now.
        buckets: State of the buckets now.
    """
    if not all(map(_possible, buckets)) or not all(math.isfinite(v) and v >= 0 for v in seen):
        return Belief(before.believed, before.doubted, "the reports contain impossible numbers")
    if buckets and all(b.energy and max(b.energy) == 0 for b in buckets):
        return Belief(before.believed, before.doubted, "the reports show no gradient at all")
    if len(before.believed) != len(seen):
        return Belief(seen, (), "")
    if not (jumps := _jumps(before.believed, seen)):
        return Belief(seen, (), "")
    if len(before.doubted) == len(seen) and not _jumps(before.doubted, seen):
        return Belief(seen, (), "")
    at = jumps[0]
    return Belief(
        before.believed,
        seen,
        f"{NAMES[at]} went from {1e3 * before.believed[at]:.3g} to {1e3 * seen[at]:.3g} ms, which"
        " has to be seen twice",
    )


def _jumps(before: tuple[float, ...], seen: tuple[float, ...]) -> list[int]:
    """Return which values jumped by so much that it matters."""
    matters = SHARE * min(sum(before[:2]), sum(seen[:2]))
    rows = enumerate(zip(before, seen, JUMPS, strict=True))
    return [i for i, (a, b, jump) in rows if abs(a - b) > matters and max(a, b) > jump * min(a, b)]


def _possible(state: BucketState) -> bool:
    """Return whether the numbers of a bucket can be true; negative ones say "unknown"."""
    numbers = (state.gain, state.gradient_sq, state.residual_sq, state.mean_sq)
    never_negative = (state.ready_seconds, *state.energy)
    return all(map(math.isfinite, numbers)) and all(0 <= v < math.inf for v in never_negative)

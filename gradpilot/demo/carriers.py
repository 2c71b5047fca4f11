"""Which carrier the cost model favours on the *emulated* link, which only the demo knows.

The controller decides from its estimate of the link. Here the same candidates are priced with the
true latency and bandwidth, so that a decision can be told right or wrong without its own estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradpilot.demo.schedule import Phase
from gradpilot.policies.cost import carried_by, coefficients
from gradpilot.protos.messages import Candidate, Decision, Option
from gradpilot.worker_agent.compressors.base import create

ALL_GATHER = "all-gather"
ALL_REDUCE = "all-reduce"


def carrier(options: Sequence[Option]) -> str:
    """Return what carries a plan's gradients: all-gather if any bucket's do, else all-reduce."""
    gathers = any(option.collective == "allgather" for option in options)
    return ALL_GATHER if gathers else ALL_REDUCE


def wire_seconds(
    option: Option, elements: Sequence[int], phase: Phase, world_size: int, backend: str = "gloo"
) -> float:
    """Return how long all buckets of a step keep the emulated link busy.

    Args:
        option: Option of all buckets.
        elements: Elements of every bucket.
        phase: The link.
        world_size: Ranks N.
        backend: Whose cost table counts.
    """
    total = 0.0
    compressor = create(option)
    for n in elements:
        for request in compressor.wire(n):
            kind = carried_by(request.collective, option.collective)
            skip = option.skip if request.skippable else 0
            alphas, payloads = coefficients(kind, world_size, skip, backend)
            total += alphas * phase.latency_seconds + payloads * request.bytes * phase.beta
    return total


def favoured(
    decision: Decision,
    compute_seconds: float,
    elements: Sequence[int],
    phase: Phase,
    world_size: int,
) -> str:
    """Return the carrier of the cheapest candidate of a decision at the emulated link.

    Cost is what the policy minimises, step time over efficiency, with nothing hidden behind the
    backward pass.

    Args:
        decision: Its front and its chosen candidate are compared.
        compute_seconds: Compute time of a step that it was taken with.
        elements: Elements of every bucket.
        phase: The link.
        world_size: Ranks N.
    """

    def cost(candidate: Candidate) -> float:
        wire = wire_seconds(candidate.options[0], elements, phase, world_size)
        return (compute_seconds + candidate.compression_seconds + wire) / candidate.efficiency

    chosen = (decision.chosen,) if decision.chosen is not None else ()
    # The demo runs uniform plans: one option for all buckets.
    uniform = [c for c in (*decision.front, *chosen) if len(c.options) == 1]
    return carrier(min(uniform, key=cost).options) if uniform else ""

"""How long a plan must stay before another may follow it.

Two plans of nearly equal worth look better in turn: each is measured while in use and only
predicted while not. So a plan that was left lately may come back only after a wait that doubles
with every time it was left, unless the network has changed since. Going back from compression to
dense or bf16 needs no such wait: of those no gain is predicted, and a bad trial should be short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradpilot.policies.base import Inputs
from gradpilot.policies.cost import coefficients
from gradpilot.policies.history import Departure, near
from gradpilot.policies.watches import Ban
from gradpilot.protos.messages import BF16, DENSE, LinkEstimate, Option

MOST_DOUBLINGS = 5
"""The wait grows to 32 times ``dwell_steps``, 640 steps by default."""

FORGOTTEN_AFTER = 128
"""Departures older than this many times ``dwell_steps`` no longer count."""

LINK_FACTOR = 1.5
"""Latency or transfer of a dense step that grew or shrank by this factor is another link."""

LINK_FLOOR = 0.2
"""Share of a dense step's wire time below which neither part is looked at: too small to matter,
and too uncertain."""


class Dwell(NamedTuple):
    """Steps that the plan in force must have lasted, and how often the wanted one was left."""

    steps: int
    times_left: int = 0


def dwell(inputs: Inputs, chosen: tuple[Option, ...], link: LinkEstimate) -> Dwell:
    """Return how long the plan in force must stay before ``chosen`` may replace it.

    Args:
        inputs: What is known.
        chosen: Option per bucket wanted.
        link: The link as it is now.
    """
    wanted = tuple(dict.fromkeys(chosen))
    if _flees(inputs, wanted):
        return Dwell(inputs.settings.dwell_steps)
    times = sum(
        near(departure.left, wanted) and not link_changed(departure, link, inputs)
        for departure in recent(inputs)
    )
    return Dwell(inputs.settings.dwell_steps * 2 ** min(times, MOST_DOUBLINGS), times)


def _flees(inputs: Inputs, wanted: tuple[Option, ...]) -> bool:
    """Return whether a switch leads from a compressing plan to one that sends everything."""
    return whole(wanted) and inputs.current is not None and not whole(inputs.current.options())


def whole(options: Sequence[Option]) -> bool:
    """Return whether every element is sent under these options, in fp32 or bf16."""
    return all(o.family in (DENSE.family, BF16.family) and not o.skip for o in options)


def recent(inputs: Inputs) -> tuple[Departure, ...]:
    """Return the departures that count: on the present layout and not too long ago."""
    if inputs.history.layout != inputs.layout.digest:
        return ()
    oldest = inputs.step - FORGOTTEN_AFTER * inputs.settings.dwell_steps
    return tuple(d for d in inputs.history.departures if oldest < d.step <= inputs.step)


def link_changed(departure: Departure | Ban, link: LinkEstimate, inputs: Inputs) -> bool:
    """Return whether the link differs from what it was at a departure or when a ban began.

    Judged by what a dense step would spend on it, not by the sequential test of the fit: another
    plan has collectives of other sizes, and what the cost model misses on them looks like a change.
    """
    alphas, payloads = coefficients("all_reduce", inputs.world_size, 0, inputs.backend)
    latency = alphas * len(inputs.layout.buckets)
    push = payloads * 4.0 * inputs.layout.elements
    old = (latency * departure.alpha_seconds, push * departure.beta_seconds_per_byte)
    new = (latency * link.alpha_seconds, push * link.beta_seconds_per_byte)
    floor = LINK_FLOOR * min(sum(old), sum(new))
    return any(
        max(a, b) > LINK_FACTOR * max(min(a, b), floor) for a, b in zip(old, new, strict=True)
    )

"""Claims about decisions: the search for a ratio, and what skipping can gain in step time.

Both use the models and the solver of ``gradpilot.policies`` on made-up jobs of realistic size.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from bench.claims.checks import Claim, Figure, Finding, at_most
from bench.claims.cost import PARAMETERS, PHASES, RANKS, link
from bench.solver import ENERGY
from gradpilot.policies.base import BucketState, Inputs, PolicySettings
from gradpilot.policies.choice import choose
from gradpilot.policies.evaluation import Evaluation
from gradpilot.policies.history import History
from gradpilot.policies.problem import Space
from gradpilot.policies.solver import nsga2_uniform
from gradpilot.protos.messages import (
    Bucket,
    ComputeSample,
    Layout,
    LinkEstimate,
    Option,
    Setting,
)
from gradpilot.warm_up import Warmth
from gradpilot.worker_agent.buckets import Slot
from gradpilot.worker_agent.catalog import families

COMPRESSION = 0.4e-9
"""Seconds that top-k takes per element, as the published table of a V100 implies."""

STAR = (Setting("selection", "star"),)
DENSE_KEY, STAR_KEY, TOPK_KEY = ("none", ()), ("artopk", STAR), ("topk", ())
FamilyKey = tuple[str, tuple[Setting, ...]]


def job(
    sizes: Sequence[int],
    wanted: Mapping[FamilyKey, tuple[str, ...]],
    *,
    ranks: int = RANKS,
    energy: tuple[float, ...] = ENERGY,
    ready: Sequence[float] | None = None,
    compute_seconds: float = 0.3,
    settings: PolicySettings | None = None,
) -> Inputs:
    """Return a decision over buckets of these sizes.

    Args:
        sizes: Elements per bucket.
        wanted: Families to choose from, each with the collectives that may carry it.
        ranks: Ranks N.
        energy: Energy curve of every bucket at ``messages.ENERGY_RATIOS``.
        ready: When each bucket is ready, seconds after the first; all at once if None.
        compute_seconds: Compute of a step.
        settings: Of the policy.
    """
    buckets = tuple(Bucket(f"bucket{i}", i, n) for i, n in enumerate(sizes))
    slots = tuple(Slot(b, ("p",), ((0, b.elements),), (torch.Size([b.elements]),)) for b in buckets)
    known = {(f.compressor, f.settings): f for f in families(slots, ranks)}
    chosen = [replace(known[key], collectives=carriers) for key, carriers in wanted.items()]
    samples = [
        ComputeSample(f.compressor, f.settings, point.ratio, n, COMPRESSION * n, 0.0)
        for f in chosen
        if f.compressor != "none"
        for point in f.ladder
        for n in (1 << 10, max(sizes))
    ]
    at = ready if ready is not None else [0.0] * len(sizes)
    return Inputs(
        run="claims",
        model="model",
        world_size=ranks,
        step=0,
        seed=0,
        layout=Layout.of(buckets),
        families=tuple(chosen),
        compute=tuple(samples),
        operations=(),
        buckets=tuple(BucketState(ready_seconds=t, energy=energy) for t in at),
        compute_seconds=compute_seconds,
        history=History(warmth=Warmth(warm=True)),  # else nothing may be skipped yet
        backend="model",
        settings=settings or PolicySettings(),
    )


def estimate(milliseconds: float, gigabits: float) -> LinkEstimate:
    """Return a link that is known exactly."""
    return LinkEstimate(*link(milliseconds, gigabits))


# --- the ratio ------------------------------------------------------------------------------------


def _knee_ratio(space: Space, evaluation: Evaluation) -> float:
    found = choose(evaluation, space.inputs.settings)
    assert found is not None
    return space.option(int(evaluation.rows[found.index][0])).ratio


def _search(quick: bool) -> Iterator[Finding]:
    settings = PolicySettings(choice="knee", gain_floor=0.0, ratios=4001)
    inputs = job([PARAMETERS["ResNet50"]], {STAR_KEY: ("native",)}, settings=settings)
    nsga2_uniform(Space(inputs, estimate(1, 1)), 0, generations=1)  # the first one imports pymoo
    apart, seconds, size = [], [], 0
    for latency, gigabits, _ in PHASES[:2] if quick else PHASES:
        space = Space(inputs, estimate(latency, gigabits))
        size = len(space)
        exact = _knee_ratio(space, space.uniform())
        for seed in range(2 if quick else 10):
            started = time.monotonic()
            found = nsga2_uniform(space, seed)
            seconds.append(time.monotonic() - started)
            apart.append(abs(_knee_ratio(space, found) / exact - 1))
    yield Figure("ratios in the grid", size)
    yield at_most(f"{len(apart)} searches: furthest from the grid's knee, share", max(apart), 0.1)
    yield at_most("median search, s", float(np.median(seconds)), 0.5)


# --- what skipping can gain -----------------------------------------------------------------------


def _bound(share: float, ranks: int, skip: int) -> float:
    return 1 / (1 - share * skip / (2 * (ranks - 1)))


_OVERLAP = (
    "With overlap a skipped step shortens the hidden part of communication first and leaves less of"
    " the rest exposed, so the exposed share alone is no bound; see the one beside it."
)


def _speed_up(quick: bool) -> Iterator[Finding]:
    alone, hidden, both = [], [], []
    for ranks in (4, 8, 16):
        for compute in (0.05, 0.3, 1.0):
            for latency, gigabits, _ in PHASES:
                speed = estimate(latency, gigabits)
                for skip in range(1, ranks):
                    alone.append(_excess(ranks, compute, speed, skip, [0.0])[0])
                    # Four buckets become ready in the course of backward.
                    ready = [compute * t for t in (0.0, 0.2, 0.4, 0.6)]
                    over, fixed = _excess(ranks, compute, speed, skip, ready)
                    hidden.append(over)
                    both.append(fixed)
    what = "greatest speed-up over 1/(1 - f S/(2 (N - 1))), share above it"
    yield at_most(f"no overlap, f exposed share: {what}", max(alone), 0.03)
    yield at_most(f"overlap, f exposed share: {what}", max(hidden), 0.03, _OVERLAP)
    yield at_most(
        f"overlap, f all of communication, and at most 1/(1 - exposed share): {what}",
        max(both),
        0.03,
    )


def _excess(
    ranks: int, compute: float, speed: LinkEstimate, skip: int, ready: Sequence[float]
) -> tuple[float, float]:
    """Return by what share the predicted speed-up exceeds both bounds."""
    sizes = [PARAMETERS["ResNet50"] // len(ready)] * len(ready)
    inputs = job(sizes, {DENSE_KEY: ("ring",)}, ranks=ranks, ready=ready, compute_seconds=compute)
    space = Space(inputs, speed)
    numbers = [space.add(Option(collective="ring", skip=s)) for s in (0, skip)]
    assert None not in numbers
    rows = np.array([[number] * len(ready) for number in numbers], dtype=np.intp)
    found = space.evaluate(rows)
    full, less = (float(s) for s in found.step_seconds)
    wire = float(found.synchronisation_seconds[0])
    exposed = (full - compute) / full
    by_exposed = _bound(exposed, ranks, skip)
    by_wire = min(_bound(min(wire / full, 1.0), ranks, skip), 1 / (1 - exposed))
    return full / less / by_exposed - 1, full / less / by_wire - 1


CLAIMS = (
    Claim("T13", "NSGA-II finds the knee of the ratio that a grid finds", "ours", "measured",
          _search),
    Claim("T17", "Skipping speeds a step up by no more than its share of communication allows",
          "derived", "by model", _speed_up),
)  # fmt: skip

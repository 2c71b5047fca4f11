"""Who agents are and what they measured; a part of ``messages``, from where it is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradpilot.protos.messages_options import Plan

PROTOCOL_VERSION = 1
"""Raised whenever an old peer could misread a message; a controller refuses other versions."""

ENERGY_RATIOS: tuple[float, ...] = (
    0.0001, 0.0003, 0.001, 0.002, 0.004, 0.0075, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0,
)  # fmt: skip
"""Kept fractions at which every energy curve is reported, ascending."""

MAGNITUDE_LOW, MAGNITUDE_BINS = -40, 48
"""Lowest exponent of two, and number, of the bins of magnitudes: 1e-12 to 256."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a session: who is there.

    Attributes:
        run: Run id, the same for all ranks of a job and across its restarts.
        model: Name of the wrapped model within the run.
        incarnation: Id of this start of the job; differs after an elastic restart.
        rank: Rank in the model's process group.
        world_size: Size of that group.
        node: Host name.
        local_rank: Rank on the node.
        agent_version: Version of gradpilot.
        protocol_version: ``PROTOCOL_VERSION`` of the agent.
        backend: Backend that carries the gradients, "gloo" or "nccl".
        device: Type of the device that holds them, "cpu" or "cuda".
        torch_version: Version of torch.
        emulated: Whether the link is emulated by delays inside the agent.
        step: Synchronised backward passes so far.
        plan: Newest plan held, so that a restarted controller learns it; None if none.
    """

    run: str
    model: str
    incarnation: str
    rank: int
    world_size: int
    node: str = ""
    local_rank: int = 0
    agent_version: str = ""
    protocol_version: int = PROTOCOL_VERSION
    backend: str = ""
    device: str = ""
    torch_version: str = ""
    emulated: bool = False
    step: int = 0
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class WireSample:
    """One collective as one rank saw it.

    ``(step, bucket, round)`` name the same operation on every rank, so the minimum over ranks is
    transfer and the rest is waiting for the slowest.

    Attributes:
        step: Step number.
        bucket: Index of the bucket; -1 for a probe.
        round: Number of the request within the bucket.
        collective: One of ``COLLECTIVES``.
        bytes: Payload bytes handed in by one rank.
        skip: Ring steps left out.
        seconds: Duration; while the collective before it was still under way, it does not count.
        overlapped_seconds: How long it had been under way beside that one.
    """

    step: int
    bucket: int
    round: int
    collective: str
    bytes: int
    skip: int
    seconds: float
    overlapped_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BucketReport:
    """What one rank measured on one bucket in a window; medians over the window's steps.

    Attributes:
        bucket: Index of the bucket.
        ready_seconds: From the first bucket of the step being ready to this one.
        compress_seconds: See ``ComputeSample``.
        decompress_seconds: See ``ComputeSample``.
        wire_seconds: All collectives of the bucket together.
        wire_bytes: Payload bytes handed to collectives in one step.
        gain: ||sent||^2 / ||corrected||^2 at the newest sampled step; -1 if not sampled.
        gradient_sq: ||gradient + residual||^2 there, of what was to be compressed: without error
            feedback the gradient alone; -1 if not sampled.
        residual_sq: ||residual||^2 there; -1 if not sampled.
        energy: Share of ||corrected||^2 in the largest elements, one value per ``ENERGY_RATIOS``;
            empty if not sampled.
        magnitudes: Sampled elements of the gradient by magnitude: bin i counts those in
            [2^e, 2^(e+1)) for e = ``MAGNITUDE_LOW`` + i, the first and last bin also what lies
            beyond; ``MAGNITUDE_BINS`` values, empty if not sampled.
        mean_sq: ||mean over ranks||^2 as it arrived under the plan; -1 if not sampled.
    """

    bucket: int
    ready_seconds: float
    compress_seconds: float
    decompress_seconds: float
    wire_seconds: float
    wire_bytes: int
    gain: float = -1.0
    gradient_sq: float = -1.0
    residual_sq: float = -1.0
    energy: tuple[float, ...] = ()
    magnitudes: tuple[int, ...] = ()
    mean_sq: float = -1.0


@dataclass(frozen=True, slots=True)
class Counters:
    """Events since the agent was attached; they only grow."""

    steps: int = 0
    switches: int = 0
    nonfinite_steps: int = 0
    residual_resets: int = 0
    reports_dropped: int = 0
    plans_rejected: int = 0
    plans_held: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    agreement_failures: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """One window of one rank.

    Attributes:
        layout: Digest of the layout that bucket indices refer to.
        sequence: Number of the report within the session's agent, growing by 1.
        first_step: First step of the window.
        last_step: Last step of the window.
        plan_term: Term of the plan that was active in the whole window.
        plan_id: Its id.
        step_seconds: Median time from one step's first ready bucket to the next step's.
        compute_seconds: Median of step time less exposed time.
        exposed_seconds: Median time that synchronisation stuck out behind the last ready bucket.
        samples: Collectives of sampled steps.
        buckets: One entry per bucket of the layout, in order.
        counters: Totals.
        loss: Newest loss given to ``handle.observe``; NaN if none.
        lr: Newest learning rate given there; NaN if none.
    """

    layout: str
    sequence: int
    first_step: int
    last_step: int
    plan_term: int
    plan_id: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    samples: tuple[WireSample, ...] = ()
    buckets: tuple[BucketReport, ...] = ()
    counters: Counters = Counters()
    loss: float = math.nan
    lr: float = math.nan


@dataclass(frozen=True, slots=True)
class Ack:
    """What became of a plan on this rank.

    Attributes:
        term: Term of the plan.
        id: Id of the plan.
        state: ``held``, ``agreed`` (all ranks switched) or ``rejected``.
        step: First step under the plan if agreed, else the present step.
        reason: Why it was rejected.
    """

    term: int
    id: int
    state: str
    step: int
    reason: str = ""

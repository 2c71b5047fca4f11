"""What a policy is asked and what it answers.

A policy is a pure function: the same inputs and seed give the same outcome, so a stored decision
can be taken again. It sees numbers only; it never imports torch or grpc and knows no compressor by
name. Those after published methods do name the ones that their papers are about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from gradpilot.policies.history import History
from gradpilot.protos.explanations import Explanation
from gradpilot.protos.messages import (
    DENSE,
    Candidate,
    ComputeSample,
    Family,
    Layout,
    LinkEstimate,
    Option,
    Plan,
)
from gradpilot.registry import Registry


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective, joined over ranks.

    Attributes:
        step: Step number; the sample's age is counted from it.
        collective: One of ``messages.COLLECTIVES``.
        bytes: Payload bytes that one rank handed in.
        skip: Ring steps left out.
        transfer_seconds: Minimum over ranks: nobody waited for a slower peer in it.
        straggle_seconds: Median over ranks less the minimum.
        age_seconds: Since the controller received it.
        complete: Whether all ranks told it. If not, everybody may have waited for one that did not.
        overlapped_seconds: How long it had been under way beside the collective before it, which
            the transfer does not hold; minimum over ranks. If that is long enough, its latency was
            over by then.
    """

    step: int
    collective: str
    bytes: int
    skip: int
    transfer_seconds: float
    straggle_seconds: float
    age_seconds: float
    complete: bool = True
    overlapped_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BucketState:
    """What is known of one bucket, aggregated over ranks.

    Attributes:
        ready_seconds: Median offset of readiness from the first bucket of a step.
        gain: Measured gain of the present option, mean over ranks; -1 if unknown.
        gradient_sq: Mean over ranks of ||gradient + residual||^2, of what was to be compressed;
            weight of the bucket in the total gain; -1 if unknown.
        residual_sq: Mean over ranks of ||residual||^2; -1 if unknown.
        energy: Mean energy curve at ``messages.ENERGY_RATIOS``; empty if unknown.
        magnitudes: Elements per octave of magnitude, added up over ranks; empty if unknown.
        mean_sq: ||mean over ranks||^2 as it arrived; -1 if unknown.
    """

    ready_seconds: float = 0.0
    gain: float = -1.0
    gradient_sq: float = -1.0
    residual_sq: float = -1.0
    energy: tuple[float, ...] = ()
    magnitudes: tuple[int, ...] = ()
    mean_sq: float = -1.0


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """What an operator may set for a policy.

    Attributes:
        choice: ``tta`` (least predicted time to accuracy), ``knee`` or ``weighted``.
        weights: Weights of statistical loss, compression and synchronisation time (``weighted``).
        gain_floor: Least expected gain over the whole gradient, [0, 1]; a family may say that a
            share of it is enough, see ``messages.Family.floor_factor``. The default is careful:
            efficiency as a power of gain is too kind to very small gains, and the residual that
            builds up under them makes the measured gain smaller than the predicted one.
        gain_band: A plan in force may fall below the floor by this share before it must go: gains
            are measured on few steps, and a plan chosen at the floor would have to go half of the
            time.
        warm_floor: The floor instead while training is young or in a critical phase; counts if it
            is above ``gain_floor``. The default is the lower of GraVAC's two published thresholds.
        min_improvement: A switch must cut the predicted cost by this share, such as 0.05.
        dwell_steps: Least number of steps between two switches; back to a plan that was left
            lately it doubles with every time that it was.
        trial_steps: First steps under a new plan, in which it is not judged: residual and gain of
            error feedback still settle.
        trial_margin: A plan on trial is undone if it costs this share more than the one before it.
        blacklist_steps: Steps for which an option that did harm is not chosen; doubles with every
            time that it did.
        residual_limit: Largest ||residual||^2 / ||gradient||^2 that is put up with; see
            ``residuals`` for where the default comes from.
        interval: Decision step N of the plans made, at most.
        interval_seconds: What lies between two decision steps is no longer than this, unless that
            is less than a step: of slow steps there are fewer.
        fixed: Option of the policy ``fixed``.
        per_bucket: Whether buckets may get different options (groups by size).
        solver_seconds: Wall-clock cap of one solve.
        ratios: Number of ratios per family in the log grid.
        selective: Whether buckets with many large elements are spared from skipping: ``continuous``
            (measured again and again), ``once`` (as first measured) or ``off``.
        collectives: Carriers that may be chosen. The default is those whose costs were measured on
            links; those of ``halving_doubling``, ``tree`` and ``alltoall`` are derived.
        skip_divisor: Divisor of options that skip: ``skip``, ``drop`` or ``shrink``.
    """

    choice: str = "tta"
    weights: tuple[float, float, float] = (0.4, 0.2, 0.4)
    gain_floor: float = 0.3
    gain_band: float = 0.05
    warm_floor: float = 0.7
    min_improvement: float = 0.05
    dwell_steps: int = 20
    trial_steps: int = 20
    trial_margin: float = 0.1
    blacklist_steps: int = 1000
    residual_limit: float = 30.0
    interval: int = 50
    interval_seconds: float = 5.0
    fixed: Option = DENSE
    per_bucket: bool = False
    solver_seconds: float = 1.0
    ratios: int = 24
    selective: str = "continuous"
    skip_divisor: str = "skip"
    collectives: tuple[str, ...] = ("native", "ring", "allgather")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a decision depends on.

    Attributes:
        run: Run id.
        model: Model name.
        world_size: Ranks N.
        step: Newest step reported.
        seed: Seed of everything random in the decision.
        layout: Present layout.
        families: What the agents can do, from the catalog.
        compute: Compressor seconds; of several for one (family, ratio, elements) the last counts.
        operations: Recent collectives, joined over ranks.
        buckets: State per bucket, in layout order.
        compute_seconds: Step time less exposed time, the part no plan changes.
        step_seconds: Measured median step time under ``current``; 0 if unknown.
        straggle_seconds: What the median rank waits in the collectives of a step for slower ranks.
        current: Plan in force; None before the first.
        start: Option of all buckets before the first plan; None if the agents did not say.
        steps_since_switch: Steps under ``current``.
        link: Estimate of the previous decision; None at the first.
        history: What the previous decisions learned.
        probing: Number of the decision whose probe is under way; 0 if none is.
        backend: Backend of the gradient collectives.
        sequential: Whether buckets go one after another even under a native plan, as they do over
            an emulated link.
        loss: Newest loss given to ``handle.observe``, mean over the ranks whose loss is finite;
            infinite if no rank's is, NaN if none gave one.
        lr: Newest learning rate given there, largest of the ranks; NaN if none gave one.
        nonfinite_steps: Steps with a non-finite gradient so far, as counted by the rank that saw
            most; only grows within a run; -1 if unknown.
        slowest_rank: Rank that the others wait for most in collectives; -1 if unknown.
        slowest_seconds: How much later than the first one it is at a collective, median.
        settings: See ``PolicySettings``.
    """

    run: str
    model: str
    world_size: int
    step: int
    seed: int
    layout: Layout
    families: tuple[Family, ...]
    compute: tuple[ComputeSample, ...]
    operations: tuple[Operation, ...]
    buckets: tuple[BucketState, ...]
    compute_seconds: float
    step_seconds: float = 0.0
    straggle_seconds: float = 0.0
    current: Plan | None = None
    start: Option | None = None
    steps_since_switch: int = 0
    link: LinkEstimate | None = None
    history: History = field(default_factory=History)
    probing: int = 0
    backend: str = "gloo"
    sequential: bool = False
    loss: float = math.nan
    lr: float = math.nan
    nonfinite_steps: int = -1
    slowest_rank: int = -1
    slowest_seconds: float = 0.0
    settings: PolicySettings = field(default_factory=PolicySettings)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A policy's answer.

    Attributes:
        outcome: ``switch``, ``keep`` or ``probe`` (the link cannot be told from the data).
        reason: Why, with the numbers that decided.
        options: Option per bucket, in layout order; empty unless ``switch``.
        chosen: The candidate chosen (also when kept: the best one seen); None if none.
        current: The plan in force under the same models; None if there is none.
        front: Pareto set.
        link: Link estimate; None if there is none yet.
        probe_bytes: Two sizes to probe; empty unless ``probe``.
        history: What the next decision should know; None to leave that as it is.
        undone: Why the plan in force was undone by a guard, such as "cost"; empty if none was.
        explanation: What people should see beside the reason; None if the policy gives none.
    """

    outcome: str
    reason: str
    options: tuple[Option, ...] = ()
    chosen: Candidate | None = None
    current: Candidate | None = None
    front: tuple[Candidate, ...] = ()
    link: LinkEstimate | None = None
    probe_bytes: tuple[int, ...] = ()
    history: History | None = None
    undone: str = ""
    explanation: Explanation | None = None


class Policy(Protocol):
    """A way to decide.

    Attributes:
        source: Where the method comes from.
        grain: ``uniform`` (one option for all buckets) or ``per bucket``, and when.
        uses: What of the inputs it decides by.
    """

    source: ClassVar[str]
    grain: ClassVar[str]
    uses: ClassVar[tuple[str, ...]]

    def decide(self, inputs: Inputs) -> Outcome:
        """Return what should be done now; never blocks, never keeps state."""
        ...


POLICIES: Registry[type[Policy]] = Registry("policy", "gradpilot.policies")

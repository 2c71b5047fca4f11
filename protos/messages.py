"""What agents, controller and operators tell each other, as frozen dataclasses.

The rest of the code sees only these classes; ``codec`` turns them into protobuf messages of the
same name and field names, and into JSON. Units: seconds, bytes, elements; ratios and gains lie in
[0, 1]. Times of day are Unix seconds; durations come from a monotonic clock.

Options, catalogs and reports are written down in files of their own; import them from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradpilot.protos.messages_catalog import (
    COLLECTIVES,
    REQUESTS,
    Ability,
    Bucket,
    BucketRounds,
    Catalog,
    ComputeSample,
    Family,
    LadderPoint,
    Layout,
    WireRound,
)
from gradpilot.protos.messages_options import (
    BF16,
    CARRIERS,
    DENSE,
    EARLY_INTERVAL,
    EARLY_STEPS,
    START_INTERVAL,
    UNSKIPPABLE,
    Assignment,
    Option,
    Plan,
    Setting,
    check_option,
    is_carrier,
)
from gradpilot.protos.messages_reports import (
    ENERGY_RATIOS,
    MAGNITUDE_BINS,
    MAGNITUDE_LOW,
    PROTOCOL_VERSION,
    Ack,
    BucketReport,
    Counters,
    Hello,
    Report,
    WireSample,
)

__all__ = [
    "BF16",
    "CARRIERS",
    "COLLECTIVES",
    "DENSE",
    "EARLY_INTERVAL",
    "EARLY_STEPS",
    "ENERGY_RATIOS",
    "MAGNITUDE_BINS",
    "MAGNITUDE_LOW",
    "MAX_MESSAGE_BYTES",
    "PROTOCOL_VERSION",
    "REQUESTS",
    "START_INTERVAL",
    "START_PROBE",
    "UNSKIPPABLE",
    "Ability",
    "Ack",
    "AgentMessage",
    "Assignment",
    "Bucket",
    "BucketReport",
    "BucketRounds",
    "Candidate",
    "Catalog",
    "ComputeSample",
    "ControllerMessage",
    "Counters",
    "Decision",
    "Done",
    "Family",
    "GoingAway",
    "Hello",
    "LadderPoint",
    "Layout",
    "LinkEstimate",
    "Option",
    "PinOrder",
    "Plan",
    "ProbeRequest",
    "Report",
    "RunDetail",
    "RunRef",
    "RunSummary",
    "Setting",
    "Welcome",
    "WireRound",
    "WireSample",
    "check_option",
    "is_carrier",
]

MAX_MESSAGE_BYTES = 2 << 20
"""Cap of one message, both directions: half of gRPC's default, so neither side must raise it."""

AgentMessage = Hello | Catalog | Report | Ack


# --- what the controller says ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello.

    Attributes:
        controller: Id of this controller process; an agent that sees it change says Hello again.
        term: Its term.
        report_seconds: Wanted time between two reports of a rank.
        plan_ttl_seconds: After this long without a controller the ranks agree on the safe plan.
    """

    controller: str
    term: int
    report_seconds: float
    plan_ttl_seconds: float


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Please time collectives of these sizes once, on all ranks, at a common decision step.

    Sent when the job's own collectives cannot separate latency from bandwidth.
    """

    id: int
    small_bytes: int
    large_bytes: int


START_PROBE = ProbeRequest(1, 4 << 10, 1 << 18)
"""What ranks under a controller ask of themselves when they start: their first collectives seldom
tell latency from bandwidth, and on a slow link another report and decision step are dear."""


@dataclass(frozen=True, slots=True)
class GoingAway:
    """The controller stops; keep the plan and connect again after the given seconds."""

    reason: str
    reconnect_seconds: float


ControllerMessage = Welcome | Plan | ProbeRequest | GoingAway


# --- decisions and operators -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Latency and inverse bandwidth of one hop as fitted from collectives.

    Attributes:
        alpha_seconds: One-way latency of a message.
        beta_seconds_per_byte: Time to push one byte.
        alpha_error: Standard error of alpha.
        beta_error: Standard error of beta.
        samples: Operations that the fit used.
        age_seconds: Since the newest of them.
        separable: Whether the sizes could tell alpha from beta.
    """

    alpha_seconds: float
    beta_seconds_per_byte: float
    alpha_error: float = 0.0
    beta_error: float = 0.0
    samples: int = 0
    age_seconds: float = 0.0
    separable: bool = True


@dataclass(frozen=True, slots=True)
class Candidate:
    """One point of a decision: options and what the models predict for them.

    Attributes:
        options: One option, or one per bucket group in layout order.
        statistical_loss: 1 - statistical efficiency of a step, minimised.
        compression_seconds: Compress and decompress time of a step, minimised.
        synchronisation_seconds: Time on the wire in a step, minimised.
        gain: Expected gain over the whole gradient.
        efficiency: Progress of one step relative to a dense step, (0, 1].
        step_seconds: Predicted step time, overlap considered.
        wire_ratio: Wire bytes / dense fp32 bytes.
    """

    options: tuple[Option, ...]
    statistical_loss: float
    compression_seconds: float
    synchronisation_seconds: float
    gain: float
    efficiency: float
    step_seconds: float
    wire_ratio: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision as it is stored and explained.

    Attributes:
        run: Run id.
        model: Model name.
        term: Controller term.
        id: Number within the run and model; the plan's id if a plan came of it.
        step: Newest step reported when it was taken.
        created: Unix seconds.
        policy: Policy name.
        outcome: ``switch``, ``keep``, ``pinned``, ``probe`` or ``error``.
        reason: Why, in one or two sentences with the numbers that decided.
        link: Link estimate used.
        current: The plan in force, evaluated by the same models; None before the first plan.
        chosen: The candidate chosen.
        front: Pareto set of the decision.
        seconds: Time that deciding took.
        plan: The plan sent; None if the present one was kept.
        inputs_json: Inputs of the policy, enough to decide again.
        explanation_json: ``explanations.Explanation``; empty if the policy gave none.
        since_json: ``explanations.Since`` of the plan in force after the decision, as far as it is
            known when asked; empty in the store.
    """

    run: str
    model: str
    term: int
    id: int
    step: int
    created: float
    policy: str
    outcome: str
    reason: str
    link: LinkEstimate | None = None
    current: Candidate | None = None
    chosen: Candidate | None = None
    front: tuple[Candidate, ...] = ()
    seconds: float = 0.0
    plan: Plan | None = None
    inputs_json: str = ""
    explanation_json: str = ""
    since_json: str = ""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run and model as an operator lists it."""

    run: str
    model: str
    state: str
    ranks: int
    world_size: int
    step: int
    plan_id: int
    plan_label: str
    step_seconds: float
    frozen: bool
    pinned: str
    updated: float


@dataclass(frozen=True, slots=True)
class RunDetail:
    """A run with its members, newest plan and newest decision."""

    summary: RunSummary
    members: tuple[Hello, ...]
    layout: Layout | None = None
    plan: Plan | None = None
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class RunRef:
    """Names a run; an empty model means the only one, a negative decision id the newest."""

    run: str
    model: str = ""
    decision: int = -1


@dataclass(frozen=True, slots=True)
class PinOrder:
    """Give all buckets this option until unpinned."""

    run: str
    model: str
    option: Option


@dataclass(frozen=True, slots=True)
class Done:
    """An operator's order was carried out."""

    detail: str

"""What agents, controller and operators tell each other, as frozen dataclasses.

The rest of the code sees only these classes; ``codec`` turns them into protobuf messages of the
same name and field names, and into JSON. Units: seconds, bytes, elements; ratios and gains lie in
[0, 1].
Times of day are Unix seconds; durations come from a monotonic clock.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from gradpilot.errors import ConfigError

PROTOCOL_VERSION = 1
"""Raised whenever an old peer could misread a message; a controller refuses other versions."""

MAX_MESSAGE_BYTES = 2 << 20
"""Cap of one message, both directions: half of gRPC's default, so neither side must raise it."""

ENERGY_RATIOS: tuple[float, ...] = (
    0.0001, 0.0003, 0.001, 0.002, 0.004, 0.0075, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0,
)  # fmt: skip
"""Kept fractions at which every energy curve is reported, ascending."""

MAGNITUDE_LOW, MAGNITUDE_BINS = -40, 48
"""Lowest exponent of two, and number, of the bins of magnitudes: 1e-12 to 256."""

CARRIERS: tuple[str, ...] = (
    "native", "ring", "halving_doubling", "tree", "allgather", "alltoall", "hierarchical",
)  # fmt: skip
"""Values of ``Option.collective``; plug-ins may add names of their own."""

UNSKIPPABLE: tuple[str, ...] = ("native", "allgather", "alltoall", "hierarchical")
"""Carriers whose steps are not ours to leave out."""

COLLECTIVES: tuple[str, ...] = (
    "all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all",
    "ring", "halving_doubling", "tree",
)  # fmt: skip
"""Operations that are timed: the backend's own five, and our all-reduces."""

REQUESTS: tuple[str, ...] = COLLECTIVES[:5]
"""What a compressor can ask for."""


# --- options and plans -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a compressor beside its ratio, such as ``selection=star``."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Option:
    """One thing a bucket can be given.

    Attributes:
        compressor: Registered name of the compressor.
        ratio: Kept fraction of elements, (0, 1]; 1 for compressors that keep all.
        collective: Who carries the payloads: ``native`` (the backend's all-reduce), one of our own
            all-reduces, which can skip (``ring``, ``halving_doubling``, ``tree``, or that of a
            plug-in), ``allgather``, ``alltoall`` (two-stage exchange) or ``hierarchical`` (dense
            inside a node, the compressor across nodes).
        skip: Reduce steps left out of our own all-reduce; of the ring, 0 .. world size - 1.
        rotation: ``random`` (roles rotate with the step) or ``static``; used when ``skip`` > 0.
        divisor: ``skip`` divides by the world size N, ``drop`` by the number of contributions,
            ``shrink`` like ``drop`` and then times ``shrink``.
        shrink: Factor (0, 1] of divisor ``shrink``: the best one is q / (q + 1 / contributions)
            for a signal-to-noise ratio q of one rank's gradient.
        skip_feedback: Keep what a skipped step omitted as residual. Off by default: the published
            method has none, and plain addition of stale slices cost accuracy when it was tried.
        settings: Further settings of the compressor, sorted by name.
    """

    compressor: str = "none"
    ratio: float = 1.0
    collective: str = "native"
    skip: int = 0
    rotation: str = "random"
    divisor: str = "skip"
    skip_feedback: bool = False
    settings: tuple[Setting, ...] = ()
    shrink: float = 1.0

    @property
    def label(self) -> str:
        """Return a short name for people, metrics and logs: ``artopk[star] 1% native``."""
        if len(self.settings) == 1:
            inner = self.settings[0].value
        else:
            inner = ",".join(f"{s.name}={s.value}" for s in self.settings)
        parts = [f"{self.compressor}[{inner}]" if inner else self.compressor]
        if self.ratio < 1.0:
            parts.append(f"{100 * self.ratio:.3g}%")
        parts.append(self.collective)
        if self.skip:
            parts.append(f"skip{self.skip}")
        return " ".join(parts)

    @property
    def family(self) -> tuple[str, tuple[Setting, ...]]:
        """Return what identifies the family that this option belongs to."""
        return (self.compressor, self.settings)


def is_carrier(name: str) -> bool:
    """Return whether ``name`` can be a value of ``Option.collective``."""
    return 0 < len(name) <= 32 and all("a" <= letter <= "z" or letter == "_" for letter in name)


def check_option(option: Option, world_size: int) -> None:
    """Check everything that can be known without the registries.

    Raises:
        ConfigError: Names the field, the value that came and the values that are accepted.
    """
    if not (0.0 < option.ratio <= 1.0):  # also catches NaN
        raise ConfigError(f"option ratio must lie in (0, 1], got {option.ratio!r}")
    if not is_carrier(option.collective):
        raise ConfigError(
            f"option collective must be one of {', '.join(CARRIERS)} or the name of a plug-in"
            f" (a to z and _), got {option.collective!r}"
        )
    if not (0 <= option.skip <= max(world_size - 1, 0)):
        raise ConfigError(
            f"option skip must lie in 0..{max(world_size - 1, 0)} for {world_size} ranks,"
            f" got {option.skip}"
        )
    if option.skip and option.collective in UNSKIPPABLE:
        raise ConfigError(
            f"skip={option.skip} needs an all-reduce of our own such as ring,"
            f" got {option.collective!r}"
        )
    if option.rotation not in ("random", "static"):
        raise ConfigError(f"option rotation must be random or static, got {option.rotation!r}")
    if option.divisor not in ("skip", "drop", "shrink"):
        raise ConfigError(f"option divisor must be skip, drop or shrink, got {option.divisor!r}")
    if not (0.0 < option.shrink <= 1.0):
        raise ConfigError(f"option shrink must lie in (0, 1], got {option.shrink!r}")


DENSE = Option()
"""fp32 all-reduce of the backend: what DDP does without us."""

BF16 = Option(compressor="bf16")
"""bf16 all-reduce of the backend: the safe plan's option."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The option of one bucket, named by its fingerprint."""

    bucket: str
    option: Option


@dataclass(frozen=True, slots=True)
class Plan:
    """The controller's output: which option each bucket gets.

    Attributes:
        term: Incarnation of the controller that made the plan; grows with every restart.
        id: Number of the plan within the run, growing also across terms.
        layout: Digest of the bucket layout that the plan was made for.
        assignments: Option per bucket fingerprint.
        default: Option of every bucket that is not assigned.
        interval: Decision step N: synchronised backward passes between decision steps, >= 1.
        policy: Name of the policy that chose.
        reason: One line for people.
    """

    term: int
    id: int
    layout: str
    assignments: tuple[Assignment, ...] = ()
    default: Option = DENSE
    interval: int = 50
    policy: str = ""
    reason: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """Return ``(term, id)``, the order in which plans are newer than each other."""
        return (self.term, self.id)

    def option(self, bucket: str) -> Option:
        """Return the option of the bucket with this fingerprint."""
        for assignment in self.assignments:
            if assignment.bucket == bucket:
                return assignment.option
        return self.default

    def options(self) -> tuple[Option, ...]:
        """Return the distinct options of the plan, default first only if nothing is assigned."""
        if not self.assignments:
            return (self.default,)
        return tuple(dict.fromkeys(a.option for a in self.assignments))


# --- what an agent says ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket as DDP hands it to the hook.

    Attributes:
        fingerprint: Identity made from its parameters and layout, not from its index.
        index: Position in the order in which DDP issues buckets.
        elements: Number of elements.
        dtype: Torch dtype without the prefix, "float32".
        parameters: Number of parameters in it.
    """

    fingerprint: str
    index: int
    elements: int
    dtype: str = "float32"
    parameters: int = 1

    @property
    def dense_bytes(self) -> int:
        """Return the bytes of the bucket at 4 bytes an element, the base of every wire ratio."""
        return 4 * self.elements


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets of a model in issue order; ``digest`` is the same on all ranks or they differ."""

    digest: str
    buckets: tuple[Bucket, ...]

    @staticmethod
    def of(buckets: tuple[Bucket, ...]) -> Layout:
        """Return the layout of these buckets with its digest (16 hex digits)."""
        text = "|".join(f"{b.index}:{b.fingerprint}:{b.elements}:{b.dtype}" for b in buckets)
        return Layout(hashlib.sha256(text.encode()).hexdigest()[:16], buckets)

    @property
    def elements(self) -> int:
        """Return the number of elements of all buckets."""
        return sum(b.elements for b in self.buckets)


@dataclass(frozen=True, slots=True)
class WireRound:
    """One round of a compressor on one bucket: what is handed to a collective.

    Attributes:
        collective: One of ``REQUESTS``.
        bytes: Payload bytes that one rank hands in.
        skippable: Whether an all-reduce of this round may leave out steps.
    """

    collective: str
    bytes: int
    skippable: bool = True


@dataclass(frozen=True, slots=True)
class BucketRounds:
    """The rounds that one bucket costs."""

    rounds: tuple[WireRound, ...]


@dataclass(frozen=True, slots=True)
class LadderPoint:
    """One ratio of a family with its exact wire rounds for every bucket, in layout order."""

    ratio: float
    buckets: tuple[BucketRounds, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """A compressor with fixed settings, its ladder of ratios, and what the controller must know.

    Attributes:
        compressor: Registered name.
        settings: Settings beside the ratio.
        collectives: Values of ``Option.collective`` that can carry it.
        ladder: Ratios worth trying, ascending; bytes between two points interpolate linearly.
        gain_model: How gain follows from the ratio: ``energy`` (top-k energy curve times
            ``gain_factor``), ``ratio`` (gain = ratio) or ``constant`` (``gain_factor``).
        gain_factor: See ``gain_model``; a prior that measured gains replace.
        efficiency_exponent: Statistical efficiency of one step = gain ** exponent; a measured
            property of the family, see the compressor's docstring for its source.
        memory_payloads: Peak wire payloads held at once, in units of one payload; the all-gather
            of N payloads holds N.
    """

    compressor: str
    settings: tuple[Setting, ...]
    collectives: tuple[str, ...]
    ladder: tuple[LadderPoint, ...]
    gain_model: str = "constant"
    gain_factor: float = 1.0
    efficiency_exponent: float = 0.0
    memory_payloads: int = 1

    def option(self, ratio: float, collective: str, skip: int = 0) -> Option:
        """Return the option of this family with the given ratio, collective and skip."""
        return Option(self.compressor, ratio, collective, skip, settings=self.settings)


@dataclass(frozen=True, slots=True)
class ComputeSample:
    """Measured seconds of a compressor's own work on one bucket size, without any waiting.

    ``compress_seconds`` is the work before the last collective of the bucket was issued,
    ``decompress_seconds`` the work after its reply.
    """

    compressor: str
    settings: tuple[Setting, ...]
    ratio: float
    elements: int
    compress_seconds: float
    decompress_seconds: float


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
class Ability:
    """A compressor that the agents have.

    Attributes:
        compressor: Registered name.
        collectives: Values of ``Option.collective`` that can carry it under some settings.
    """

    compressor: str
    collectives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """What the agent can do on its present layout; sent again when the layout changes.

    Attributes:
        layout: The layout.
        families: What a policy can choose from, with what it must know of each.
        calibration: What the compressors of these families cost on this device.
        abilities: Everything that an operator can order; empty from an agent that does not say.
    """

    layout: Layout
    families: tuple[Family, ...]
    calibration: tuple[ComputeSample, ...] = ()
    abilities: tuple[Ability, ...] = ()


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
        seconds: Duration.
    """

    step: int
    bucket: int
    round: int
    collective: str
    bytes: int
    skip: int
    seconds: float


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
        gradient_sq: ||gradient||^2 there; -1 if not sampled.
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

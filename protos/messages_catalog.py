"""What agents can do, on which buckets; a part of ``messages``, from where it is imported."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from gradpilot.protos.messages_options import Option, Setting

COLLECTIVES: tuple[str, ...] = (
    "all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all",
    "ring", "halving_doubling", "tree", "scatter_broadcast",
)  # fmt: skip
"""Operations that are timed: the backend's own five, our all-reduces and our broadcast."""

REQUESTS: tuple[str, ...] = COLLECTIVES[:5]
"""What a compressor can ask for."""


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
        floor_factor: Share of the operator's gain floor that holds for this family, (0, 1]. Less
            than 1 where trainings went well at gains at which others do not.
    """

    compressor: str
    settings: tuple[Setting, ...]
    collectives: tuple[str, ...]
    ladder: tuple[LadderPoint, ...]
    gain_model: str = "constant"
    gain_factor: float = 1.0
    efficiency_exponent: float = 0.0
    memory_payloads: int = 1
    floor_factor: float = 1.0

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

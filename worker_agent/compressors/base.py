"""What a compressor is: rounds of collectives that turn a gradient into an estimate of its mean.

Letters: N world size, r rank, n elements of the bucket, k kept elements.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import ClassVar, Self

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting, WireRound
from gradpilot.registry import Registry
from gradpilot.worker_agent.collectives.base import Collective, carriers
from gradpilot.worker_agent.compressors.sent import Sent
from gradpilot.worker_agent.compressors.settings import Bounds, bounds_of, check_bounds, write

NOTHING: Mapping[str, Tensor] = MappingProxyType({})
"""The memory of a compressor that has none, or has not run yet."""

ESTIMATORS = ("exact", "unbiased", "contractive", "biased")
"""What a compressor may promise, see ``Compressor.estimator``."""


@dataclass(frozen=True, slots=True)
class At:
    """Where a round takes place; with the seed, all that a random choice may depend on.

    Attributes:
        rank: Rank r within the group.
        world_size: Ranks N.
        step: Synchronised backward passes before this one.
        bucket: Fingerprint of the bucket.
        seed: Seed of the run, the same on all ranks.
        shapes: Shapes of the parameters in the bucket, in buffer order.
        divide: Whether a dense mean divides by N instead of multiplying by 1/N; only to give the
            very bits that DDP would.
        feedback: Whether the caller keeps what was not sent. If False, ``rounds`` may overwrite
            ``grad`` and may leave ``Estimate.sent`` None.
        memory: ``Estimate.memory`` of the last step of this bucket that took effect; empty if there
            was none under this compressor and these settings. Not to be changed in place.
        out: Where the mean goes, see ``room``; None for a new tensor.
    """

    rank: int
    world_size: int
    step: int
    bucket: str = ""
    seed: int = 0
    shapes: tuple[torch.Size, ...] = ()
    divide: bool = False
    feedback: bool = True
    memory: Mapping[str, Tensor] = field(default_factory=lambda: NOTHING)
    out: Tensor | None = None

    def room(self, grad: Tensor) -> Tensor:
        """Return the tensor that the mean has to be left in; its contents are undefined.

        With ``feedback`` it shares no memory with ``grad``: the caller's ``out``, which spares a
        bucket of fresh memory, or a new one. Without, it is ``grad`` itself.

        Args:
            grad: The gradient that ``rounds`` got.
        """
        if not self.feedback:
            return grad
        return torch.empty_like(grad) if self.out is None else self.out

    def within(self) -> At:
        """Return the same place for rounds over a part of the bucket, whose mean goes elsewhere."""
        return self if self.out is None else replace(self, out=None)

    def random(self, what: str, *, own: bool = False) -> int:
        """Return 63 random bits that are replayable and equal on all ranks, unless ``own``.

        Args:
            what: Names the purpose, so that two choices of one step are independent.
            own: Whether every rank gets bits of its own.
        """
        text = f"{self.seed}|{self.step}|{self.bucket}|{what}"
        if own:
            text += f"|{self.rank}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def generator(
        self, what: str, device: torch.device | str = "cpu", *, own: bool = False
    ) -> torch.Generator:
        """Return a generator seeded by ``random``; its numbers differ between device types."""
        return torch.Generator(device).manual_seed(self.random(what, own=own))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the rounds of one bucket end with.

    Attributes:
        mean: Estimate of the mean gradient over ranks, n elements in the dtype of the gradient,
            bit-identical on all ranks; left in ``At.room``.
        sent: This rank's part in it, so that ``residual = corrected + carried - sent``: a ``Sent``,
            a dense tensor of any float dtype, or None for "all of it".
        carried: Dense vector that the compressor itself added to the corrected gradient before it
            chose what to send (momentum of DGC); None for nothing.
        memory: What the compressor wants to find in ``At.memory`` in the bucket's next step. Fresh
            tensors of any shape. It takes effect, like the residual, only if the whole step was
            finite on all ranks, and is dropped when the bucket gets another compressor.
    """

    mean: Tensor
    sent: Tensor | Sent | None
    carried: Tensor | None = None
    memory: Mapping[str, Tensor] = field(default_factory=lambda: NOTHING)


Rounds = Generator[Collective, Tensor, Estimate]


class Compressor(ABC):
    """An algorithm of gradient compression with its settings.

    Subclasses are frozen keyword-only dataclasses whose fields are their settings, made by the
    functions of ``compressors.settings``; a field named ``ratio`` is the kept fraction. They state
    the wire formula (``wire``) beside the algorithm (``rounds``); a test holds the two together.
    Instances hold no state: what must survive a step goes through ``Estimate.memory``.

    Class attributes:
        name: Registered name.
        source: Paper, specification or code that defines it, for people.
        estimator: What a rank's sent part, as decoded, is to its corrected gradient: ``exact`` (all
            of it), ``unbiased`` (equal in expectation over seeds), ``contractive`` (the rest has at
            most the norm of the whole, so that error feedback cannot blow up by itself) or
            ``biased``. May depend on settings.
        exchange: Which collective carries the gradient values: ``all_reduce``, ``all_gather`` or
            ``all_to_all``. May be a field.
        fixed_wire: Whether rounds and bytes depend on sizes alone; may depend on settings. If not,
            ``wire`` states what to expect, the sizes that ranks select are exchanged first, and the
            host waits for them.
        needs_matrices: Whether it works on ``At.shapes``; vectors go uncompressed.
        reduce_scatter: Whether its payload is elementwise, so that a reduce-scatter could carry it.
        lossless: Whether everything is always sent, so that no residual can arise. If it is also
            ``single_round``, its payload without feedback must be the gradient's own storage.
        single_round: Whether it asks for exactly one all-reduce, so that the backend may carry
            several buckets at once without a communication thread.
        linear_memory: Names in ``Estimate.memory`` of what grows with the gradient; multiplied when
            the loss scale changes.
        calibrated: Whether ``efficiency_exponent`` was fitted to training runs, for some settings
            at least. Policies choose by it, so only what is calibrated is offered to them; the
            rest can be pinned.
        gain_model: See ``messages.Family``.
        gain_factor: See ``messages.Family``. May depend on settings.
        efficiency_exponent: See ``messages.Family``. May depend on settings.
        floor_factor: See ``messages.Family``.
    """

    name: ClassVar[str]
    source: ClassVar[str] = ""
    needs_matrices: ClassVar[bool] = False
    reduce_scatter: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    single_round: ClassVar[bool] = False
    linear_memory: ClassVar[tuple[str, ...]] = ()
    calibrated: ClassVar[bool] = False
    gain_model: ClassVar[str] = "constant"
    floor_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_bounds(self)

    @classmethod
    def from_option(cls, option: Option) -> Self:
        """Return the compressor that an option asks for.

        Raises:
            ConfigError: A setting is unknown or out of bounds.
        """
        bounds = dict(bounds_of(cls))
        has_ratio = bounds.pop("ratio", None) is not None
        if not has_ratio and option.ratio != 1.0:
            raise ConfigError(f"{cls.name} has no ratio: it must be 1, got {option.ratio!r}")
        values = {"ratio": option.ratio} if has_ratio else {}
        for setting in option.settings:
            known: Bounds | None = bounds.get(setting.name)
            if known is None:
                accepted = ", ".join(sorted(bounds)) or "none"
                raise ConfigError(
                    f"{cls.name} has no setting {setting.name!r}; accepted: {accepted}"
                )
            values[setting.name] = known.parse(setting.value)
        return cls(**values)

    @classmethod
    @abstractmethod
    def ladder(cls) -> Sequence[Self]:
        """Return the settings worth trying; members that differ in ratio only form a family."""

    @property
    def ratio(self) -> float:
        """Return the kept fraction of elements, (0, 1]."""
        return 1.0

    @property
    def gain_factor(self) -> float:
        """Return the prior of the gain model."""
        return 1.0

    @property
    def efficiency_exponent(self) -> float:
        """Return by what power of the gain a step makes progress; 0 if that costs no steps."""
        return 0.0

    def calibrated_for(self, world_size: int) -> bool:
        """Return whether these settings are calibrated for so many ranks.

        Args:
            world_size: Ranks N.
        """
        return self.calibrated

    @property
    def estimator(self) -> str:
        """Return what the sent part is to the whole, one of ``ESTIMATORS``."""
        return "contractive"

    @property
    def fixed_wire(self) -> bool:
        """Return whether rounds and bytes depend on sizes alone."""
        return True

    @property
    def exchange(self) -> str:
        """Return which collective carries the gradient values."""
        return "all_reduce"

    @property
    def collectives(self) -> tuple[str, ...]:
        """Return the values of ``Option.collective`` that can carry it."""
        return carriers(self.exchange)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Return the settings beside the ratio that say which it is, sorted by name.

        Those are the ones that vary along the ladder, and others that are not the default.
        """
        kind = type(self)
        default, varied = kind(), _varied(kind)
        return tuple(
            Setting(name, write(getattr(self, name)))
            for name in sorted(set(bounds_of(kind)) - {"ratio"})
            if name in varied or getattr(self, name) != getattr(default, name)
        )

    def check(self, world_size: int, collective: str) -> None:  # noqa: B027 - mostly nothing to check
        """Check what depends on where it is used; the same answer on all ranks.

        Args:
            world_size: Ranks N that exchange its payloads.
            collective: ``Option.collective``.

        Raises:
            ConfigError: So many ranks, or this carrier, cannot be served.
        """

    @abstractmethod
    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return the payloads that one rank hands in for a bucket of ``n`` fp32 elements.

        Args:
            n: Elements of the bucket.
            shapes: Shapes of its parameters, in buffer order.
            ranks: Ranks N, for payloads that are cut into parts for each of them.
        """

    @abstractmethod
    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Yield collective requests, receive their results, return the estimate.

        Every rank must call it with the same settings, numel, dtype and ``at`` but for ``rank``
        and ``memory``. If ``grad`` holds a non-finite value on any rank, the mean must be
        non-finite on all; the caller replaces such a gradient by NaN in every element before it
        calls.

        Args:
            grad: 1-D contiguous gradient of one bucket, residual already added. Not changed unless
                ``at.feedback`` is False.
            at: Where this takes place.
        """


@cache
def _varied(kind: type[Compressor]) -> frozenset[str]:
    """Return which settings beside the ratio differ between members of a ladder."""
    members = kind.ladder()
    names = set(bounds_of(kind)) - {"ratio"}
    return frozenset(n for n in names if len({getattr(m, n) for m in members}) > 1)


COMPRESSORS: Registry[type[Compressor]] = Registry(
    "compressor", "gradpilot.worker_agent.compressors"
)


def option_of(compressor: Compressor, collective: str, **fields: object) -> Option:
    """Return the option that asks for this compressor over ``collective``."""
    return Option(
        compressor=compressor.name,
        ratio=compressor.ratio,
        collective=collective,
        settings=compressor.settings,
        **fields,  # type: ignore[arg-type]
    )


def create(option: Option) -> Compressor:
    """Return the compressor that ``option`` asks for.

    Raises:
        UnknownNameError: No such compressor.
        ConfigError: A setting is wrong, or the collective cannot carry this compressor.
    """
    compressor = COMPRESSORS.get(option.compressor).from_option(option)
    if option.collective not in compressor.collectives:
        raise ConfigError(
            f"{option.compressor} can be carried by {', '.join(compressor.collectives)},"
            f" got {option.collective!r}"
        )
    return compressor


def leave_residual_(corrected: Tensor, estimate: Estimate) -> Tensor:
    """Turn a corrected gradient into the residual, ``corrected + carried - sent``, in place.

    Args:
        corrected: 1-D gradient plus residual; overwritten and returned.
        estimate: What the compressor ended with on the same rank and bucket.
    """
    sent = estimate.sent
    if sent is None:
        return corrected.zero_()
    if estimate.carried is not None:
        corrected.add_(estimate.carried)
    return sent.subtract_from_(corrected) if isinstance(sent, Sent) else corrected.sub_(sent)

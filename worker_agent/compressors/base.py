"""What a compressor is: rounds of collectives that turn a gradient into an estimate of its mean.

Letters: N world size, r rank, n elements of the bucket, k kept elements.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting, WireRound
from gradpilot.registry import Registry
from gradpilot.worker_agent.collectives.base import Collective


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
    """

    rank: int
    world_size: int
    step: int
    bucket: str = ""
    seed: int = 0
    shapes: tuple[torch.Size, ...] = ()
    divide: bool = False
    feedback: bool = True

    def random(self, what: str) -> int:
        """Return 63 random bits that are equal on all ranks and replayable.

        Args:
            what: Names the purpose, so that two choices of one step are independent.
        """
        text = f"{self.seed}|{self.step}|{self.bucket}|{what}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class Sparse:
    """A vector of ``n`` elements that is zero but for ``values`` at unique ``indices`` (int64)."""

    indices: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the rounds of one bucket end with.

    Attributes:
        mean: Estimate of the mean gradient over ranks, n elements in the dtype of the gradient,
            bit-identical on all ranks.
        sent: This rank's part in it, so that ``residual = corrected - sent``: dense (any float
            dtype), ``Sparse``, or None for "all of it".
    """

    mean: Tensor
    sent: Tensor | Sparse | None


Rounds = Generator[Collective, Tensor, Estimate]


class Compressor(ABC):
    """An algorithm of gradient compression with its settings; holds no state between steps.

    Subclasses are frozen keyword-only dataclasses whose fields are their settings. They state the
    wire formula (``wire``) beside the algorithm (``rounds``); a test holds the two together.

    Class attributes:
        name: Registered name.
        collectives: Values of ``Option.collective`` that can carry it.
        lossless: Whether everything is always sent, so that no residual can arise. If it is also
            ``single_round``, its payload without feedback must be the gradient's own storage.
        single_round: Whether it asks for exactly one all-reduce, so that the backend may carry
            several buckets at once without a communication thread.
        gain_model: See ``messages.Family``.
        gain_factor: See ``messages.Family``.
        efficiency_exponent: See ``messages.Family``.
    """

    name: ClassVar[str]
    collectives: ClassVar[tuple[str, ...]]
    lossless: ClassVar[bool] = False
    single_round: ClassVar[bool] = False
    gain_model: ClassVar[str] = "constant"
    gain_factor: ClassVar[float] = 1.0
    efficiency_exponent: ClassVar[float] = 0.0

    @classmethod
    @abstractmethod
    def from_option(cls, option: Option) -> Compressor:
        """Return the compressor that an option asks for.

        Raises:
            ConfigError: A setting is unknown or out of bounds.
        """

    @classmethod
    @abstractmethod
    def ladder(cls) -> Sequence[Compressor]:
        """Return the settings worth trying; members that differ in ratio only form a family."""

    @property
    def ratio(self) -> float:
        """Return the kept fraction of elements, (0, 1]."""
        return 1.0

    @property
    def settings(self) -> tuple[Setting, ...]:
        """Return the settings beside the ratio, sorted by name."""
        return ()

    @abstractmethod
    def wire(self, n: int, shapes: Sequence[torch.Size] = ()) -> tuple[WireRound, ...]:
        """Return the payloads that one rank hands in for a bucket of ``n`` fp32 elements."""

    @abstractmethod
    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Yield collective requests, receive their results, return the estimate.

        Every rank must call it with the same settings, numel, dtype and ``at`` but for ``rank``.
        If ``grad`` holds a non-finite value on any rank, the mean must be non-finite on all; the
        caller replaces such a gradient by NaN in every element before it calls.

        Args:
            grad: 1-D contiguous gradient of one bucket, residual already added. Not changed unless
                ``at.feedback`` is False.
            at: Where this takes place.
        """


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
    kind = COMPRESSORS.get(option.compressor)
    if option.collective not in kind.collectives:
        raise ConfigError(
            f"{option.compressor} can be carried by {', '.join(kind.collectives)},"
            f" got {option.collective!r}"
        )
    return kind.from_option(option)


def read_settings(option: Option, *known: str) -> dict[str, str]:
    """Return the settings of ``option`` by name.

    Args:
        option: The option.
        known: Names that the compressor understands.

    Raises:
        ConfigError: A setting has another name.
    """
    for setting in option.settings:
        if setting.name not in known:
            accepted = ", ".join(known) or "none"
            raise ConfigError(
                f"{option.compressor} has no setting {setting.name!r}; accepted: {accepted}"
            )
    return {setting.name: setting.value for setting in option.settings}


def require_dense(option: Option) -> None:
    """Check the option of a compressor that keeps every element and has no settings.

    Raises:
        ConfigError: The ratio is not 1, or there is a setting.
    """
    read_settings(option)
    if option.ratio != 1.0:
        raise ConfigError(f"{option.compressor} keeps all: ratio must be 1, got {option.ratio!r}")


def subtract_sent_(corrected: Tensor, sent: Tensor | Sparse | None) -> Tensor:
    """Turn a corrected gradient into the residual, ``corrected - sent``, in place.

    Args:
        corrected: 1-D gradient plus residual; overwritten and returned.
        sent: ``Estimate.sent`` of the same rank and bucket.
    """
    if sent is None:
        return corrected.zero_()
    if isinstance(sent, Sparse):
        values = sent.values.to(corrected.dtype)
        return corrected.index_add_(0, sent.indices, values, alpha=-1)
    return corrected.sub_(sent)

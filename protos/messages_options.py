"""What a bucket can be given, and plans; a part of ``messages``, from where it is imported."""

from __future__ import annotations

from dataclasses import dataclass

from gradpilot.errors import ConfigError

CARRIERS: tuple[str, ...] = (
    "native", "ring", "halving_doubling", "tree", "allgather", "alltoall", "hierarchical",
)  # fmt: skip
"""Values of ``Option.collective``; plug-ins may add names of their own."""

UNSKIPPABLE: tuple[str, ...] = ("native", "allgather", "alltoall", "hierarchical")
"""Carriers whose steps are not ours to leave out."""


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


START_INTERVAL = 20
"""Decision step of ranks that have no plan yet."""

EARLY_INTERVAL, EARLY_STEPS = 2, 40
"""The same in their first so many steps, a multiple of both: where steps take seconds the first
plan must not wait for twenty of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The controller's output: which option each bucket gets.

    Attributes:
        term: Incarnation of the controller that made the plan; grows with every restart.
        id: Number of the plan within the run, growing also across terms.
        layout: Digest of the bucket layout that the plan was made for.
        assignments: Option per bucket fingerprint.
        default: Option of every bucket that is not assigned.
        interval: Decision step N: synchronised backward passes between decision steps, >= 1. Of
            what ranks start with, plan 0, see ``EARLY_INTERVAL``.
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

    def steps_to_decision(self, step: int) -> int:
        """Return how many steps after ``step`` the next decision step is; 0 if it is one.

        Args:
            step: Synchronised backward passes before it.
        """
        early = self.id == 0 and step <= EARLY_STEPS
        return -step % (min(self.interval, EARLY_INTERVAL) if early else self.interval)

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

"""What the guards remember between two decisions; a part of ``history``.

Plain records: the rules that fill and read them are in ``credibility``, ``trial``, ``blacklist``,
``overflow``, ``residuals`` and ``regime``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradpilot.protos.messages import Option, Setting


@dataclass(frozen=True, slots=True)
class Look:
    """What a decision saw of the things that no plan changes.

    Attributes:
        present: Distinct options in use, in layout order; empty if unknown.
        steps: Steps since the switch to them.
        believed: Values that decisions were based on, see ``credibility.values``; empty at first.
        doubted: Values of the newest look if they were too odd to act on; else empty.
    """

    present: tuple[Option, ...] = ()
    steps: int = 0
    believed: tuple[float, ...] = ()
    doubted: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Trial:
    """A switch that has yet to prove itself.

    Attributes:
        left: Option per bucket of the last plan that proved itself; a single one if all have the
            same.
        to: The same for the plan on trial.
        step: Newest step reported when the switch to it was decided.
        left_seconds: Measured step time under ``left``; 0 if unknown.
        left_efficiency: Its predicted efficiency then.
        compute_seconds: Compute time of a step then.
        waited_seconds: Waiting for slower ranks then.
        losses: Last losses that differ, under ``left``.
        worse: Looks in a row at which the plan cost more than the one before.
        fine: Looks in a row at which it did not.
        rising: Looks in a row at which the loss had risen.
    """

    left: tuple[Option, ...]
    to: tuple[Option, ...]
    step: int
    left_seconds: float
    left_efficiency: float
    compute_seconds: float
    waited_seconds: float
    losses: tuple[float, ...] = ()
    worse: int = 0
    fine: int = 0
    rising: int = 0


@dataclass(frozen=True, slots=True)
class Ban:
    """An option that did harm and may not be chosen for a while.

    Attributes:
        compressor: Registered name.
        settings: Settings beside the ratio.
        ratio: Kept fraction.
        collective: Who carried it.
        skip: Reduce steps left out.
        cause: One of ``blacklist.CAUSES``.
        step: Step at which it was banned last.
        until: First step at which it may be chosen again.
        times: How often it was banned.
        alpha_seconds: Latency of the link then.
        beta_seconds_per_byte: Inverse bandwidth of the link then.
    """

    compressor: str
    settings: tuple[Setting, ...]
    ratio: float
    collective: str
    skip: int
    cause: str
    step: int
    until: int
    times: int
    alpha_seconds: float
    beta_seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class Overflow:
    """Steps with a non-finite gradient, as far as they were seen.

    Attributes:
        count: Newest value of the counter; -1 if it was never told.
        looks: Looks since the switch at which it had grown.
        steps: By how much it grew since the switch.
        dense_step: Newest step at which it had grown under a plan of fp32 all-reduces; -1 if never.
        whole_step: The same under a plan that sends everything, in fp32 or bf16.
    """

    count: int = -1
    looks: int = 0
    steps: int = 0
    dense_step: int = -1
    whole_step: int = -1


@dataclass(frozen=True, slots=True)
class ResidualTrend:
    """How the residual compares with the gradient.

    Attributes:
        gradient_sq: ||gradient||^2 per bucket when everything was sent last, without any residual
            in it; empty if that was never measured.
        ratio: Moving average of ||residual||^2 / ||gradient||^2 over all buckets; -1 at first.
        last: The newest value, by which a look without a new measurement is told.
        growing: Measurements in a row at which it was well above the average.
        over: Measurements in a row at which it was above the limit.
    """

    gradient_sq: tuple[float, ...] = ()
    ratio: float = -1.0
    last: float = -1.0
    growing: int = 0
    over: int = 0


@dataclass(frozen=True, slots=True)
class Regime:
    """What tells a critical phase of training apart from a calm one, beside ``Warmth``.

    Attributes:
        lr: Newest learning rate observed; NaN if none was.
        gain: Moving average of the gain measured under the present plan; -1 if unknown.
        apart: Looks in a row at which the gain was well above that average, or below it (negative).
        losses: Last losses that differ, under the present plan, oldest first.
    """

    lr: float = math.nan
    gain: float = -1.0
    apart: int = 0
    losses: tuple[float, ...] = ()

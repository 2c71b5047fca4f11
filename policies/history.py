"""What a policy carries from one decision to the next.

Policies keep no state. What one learned goes out with its outcome and comes back with the next
inputs, as the link estimate does; it is stored with them, so a decision can be taken again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gradpilot.errors import ProtocolError
from gradpilot.policies.importance import Importance
from gradpilot.policies.watches import Ban, Look, Overflow, Regime, ResidualTrend, Trial
from gradpilot.protos.jsoncodec import from_json
from gradpilot.protos.messages import Option, Setting
from gradpilot.warm_up import Warmth

RATIO_BUCKETS_PER_DECADE = 4
"""Ratios in one bucket, a factor of 1.8 wide, are close enough to share what was learned."""


@dataclass(frozen=True, slots=True)
class GainRecord:
    """How the gain of a family turned out where it was tried.

    Attributes:
        compressor: Registered name.
        settings: Settings beside the ratio.
        ratio: Kept fraction that was tried.
        factor: Measured gain over the gain predicted before it was tried.
        step: Newest step at which it was in use; the record fades from there on.
        missed: The measured gain if it was below the floor, else -1.
    """

    compressor: str
    settings: tuple[Setting, ...]
    ratio: float
    factor: float
    step: int
    missed: float = -1.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """The uncorrected gain that was predicted for an option when it was chosen.

    Under the option itself the residual changes the gradient's energy curve, so a prediction made
    then cannot tell how wrong the first one was.
    """

    compressor: str
    settings: tuple[Setting, ...]
    ratio: float
    gain: float


@dataclass(frozen=True, slots=True)
class Departure:
    """A switch away from a plan.

    Attributes:
        left: Its distinct options in layout order.
        to: Those of the plan that was to follow.
        step: Newest step reported when that was decided.
        alpha_seconds: Latency of the link then.
        beta_seconds_per_byte: Inverse bandwidth of the link then.
    """

    left: tuple[Option, ...]
    to: tuple[Option, ...]
    step: int
    alpha_seconds: float
    beta_seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The step time that a decision predicted for the plan in force after it.

    Attributes:
        options: Option per bucket; a single one if all have the same.
        seconds: Predicted step time.
        untried: Whether the plan was not in use when it was predicted.
        step: Newest step reported then.
    """

    options: tuple[Option, ...]
    seconds: float
    untried: bool
    step: int


@dataclass(frozen=True, slots=True)
class StepError:
    """How a forecast of step time turned out.

    Attributes:
        label: The plan, for people.
        compressor: Registered name of its compressor; ``mixed`` if it has several.
        ratio: Measured step time / predicted.
        untried: See ``StepForecast``.
        step: Newest step reported at that look.
    """

    label: str
    compressor: str
    ratio: float
    untried: bool
    step: int


@dataclass(frozen=True, slots=True)
class History:
    """Everything remembered.

    Attributes:
        layout: Digest of the layout that departures and forecasts belong to.
        gains: One record per family and bucket of ratios, the newest last.
        forecasts: Of the newest switch.
        departures: Recent switches, oldest first.
        importance: Which buckets must not skip, and how that changed.
        warmth: Whether the run is stable enough for strong compression and skips.
        snr: Newest signal-to-noise ratio of one rank's gradient; -1 if never measured.
        look: What the newest decision saw of the things that no plan changes.
        trial: The newest switch, while it has yet to prove itself; None if none has.
        bans: Options that did harm, the newest last.
        overflow: Steps with a non-finite gradient.
        residuals: How the residual compares with the gradient.
        regime: Learning rate, gain and losses of late.
        forecast: Step time predicted for the plan in force; None if it was not.
        errors: How earlier forecasts turned out, oldest first; see ``accuracy``.
        own: What a policy other than ``adaptive`` carries along, as JSON of a dataclass of its own.
    """

    layout: str = ""
    gains: tuple[GainRecord, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    departures: tuple[Departure, ...] = ()
    importance: Importance = field(default_factory=Importance)
    warmth: Warmth = field(default_factory=Warmth)
    snr: float = -1.0
    look: Look = field(default_factory=Look)
    trial: Trial | None = None
    bans: tuple[Ban, ...] = ()
    overflow: Overflow = field(default_factory=Overflow)
    residuals: ResidualTrend = field(default_factory=ResidualTrend)
    regime: Regime = field(default_factory=Regime)
    forecast: StepForecast | None = None
    errors: tuple[StepError, ...] = ()
    own: str = ""


@dataclass(frozen=True, slots=True)
class _Stored:
    """The part of a policy's inputs that is wanted of a stored decision."""

    history: History = field(default_factory=History)


def stored_history(inputs_json: str) -> History:
    """Return the history in the inputs of a stored decision; an empty one if it has none.

    A controller that starts again has what its last decision knew, not what that one learned.
    """
    try:
        return from_json(_Stored, inputs_json).history
    except ProtocolError:
        return History()


def ratio_bucket(ratio: float) -> int:
    """Return the number of the bucket of ratios that a ratio lies in, 0 for those near 1."""
    return round(RATIO_BUCKETS_PER_DECADE * math.log10(ratio)) if 0 < ratio < math.inf else 0


def near(first: tuple[Option, ...], second: tuple[Option, ...]) -> bool:
    """Return whether two plans are as good as the same: same methods, ratios less than 1.5 apart.

    Args:
        first: Distinct options of one plan, in layout order.
        second: Those of the other.
    """
    return len(first) == len(second) and all(
        (a.family, a.collective, a.skip) == (b.family, b.collective, b.skip)
        and a.ratio < 1.5 * b.ratio
        and b.ratio < 1.5 * a.ratio
        for a, b in zip(first, second, strict=True)
    )

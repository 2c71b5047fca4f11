"""What ``Decision.explanation_json`` and ``Decision.since_json`` hold, as dataclasses.

They travel and are stored as JSON inside a decision, so a new figure for people changes neither the
protocol nor the store; ``jsoncodec`` ignores what it does not know. Units: seconds and bytes;
shares and relative errors without unit.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from gradpilot.protos.messages import Candidate

IN_FORCE, CHOSEN, BANNED, BELOW_FLOOR = MARKS = (
    "in force", "chosen", "black-listed", "below the floor",
)  # fmt: skip
"""What can be said of a candidate beside its prediction."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How far measured step times were from predicted ones, and how sure that is.

    Attributes:
        low: Least measured / predicted step time that is to be expected.
        high: The greatest.
        share: Share of looks that lie between, if the next ones are like those before.
        looks: Looks that it comes from.
        of: What they were looks at, for people.
    """

    low: float
    high: float
    share: float
    looks: int
    of: str


@dataclass(frozen=True, slots=True)
class Ranked:
    """One of the best candidates.

    Attributes:
        candidate: Its options, and what the models predict for them.
        marks: Of ``MARKS``, those that fit.
    """

    candidate: Candidate
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BucketAdvice:
    """What DDP buckets of another size would give under the options chosen.

    Attributes:
        megabytes: ``bucket_cap_mb`` of DDP, 2^20 bytes.
        buckets: Buckets that the model would then have.
        step_seconds: Predicted step time.
    """

    megabytes: float
    buckets: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured when a decision was taken; the link is in the decision itself.

    Attributes:
        ranks: Ranks of the job.
        steps: Steps under the plan in force.
        step_seconds: Step time; 0 if unknown.
        compute_seconds: The part of it that no plan changes.
        straggle_seconds: What the median rank waits in the collectives of a step for slower ones.
        slowest_rank: Rank that the others wait for most; -1 if unknown.
        slowest_seconds: How much later than the first one it is at a collective, median.
        gain: Measured gain over the whole gradient; -1 if unknown.
        snr: Signal-to-noise ratio of one rank's gradient; -1 if unknown.
        residual_ratio: ||residual||^2 / ||gradient||^2; -1 if unknown.
    """

    ranks: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    compute_seconds: float = 0.0
    straggle_seconds: float = 0.0
    slowest_rank: int = -1
    slowest_seconds: float = 0.0
    gain: float = -1.0
    snr: float = -1.0
    residual_ratio: float = -1.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is told of a decision beside the reason.

    Attributes:
        seen: What was measured; None if that is not known.
        best: The best candidates, best first, and those that they compare with.
        interval: Of the prediction for what is in force after the decision; None if there are too
            few looks.
        advice: Other bucket sizes under the options chosen, ascending.
    """

    seen: Seen | None = None
    best: tuple[Ranked, ...] = ()
    interval: Interval | None = None
    advice: tuple[BucketAdvice, ...] = ()


@dataclass(frozen=True, slots=True)
class Since:
    """What became of a plan, measured.

    Attributes:
        id: Decision that made the plan.
        before: Plan before it, for people; empty if there was none.
        before_seconds: Step time measured under that one when the decision was taken; NaN unknown.
        before_efficiency: Efficiency predicted for it then; NaN unknown.
        predicted_seconds: Step time that the decision predicted; NaN if it did not.
        predicted_efficiency: Efficiency that it predicted; NaN if it did not.
        first_step: First step that was reported under the plan; -1 if none was.
        last_step: Newest such step; -1 if none was.
        measured: Step time at the newest looks under it, oldest first.
        gain: Newest gain measured under it; -1 if unknown.
        undoes: Which guard had the plan before undone by this one; empty if none had.
        end: Empty while it is the newest plan, ``replaced`` or ``undone`` afterwards.
        cause: Which guard undid it; empty if none did.
        ended_by: Decision that ended it; 0 if none did.
    """

    id: int
    before: str = ""
    before_seconds: float = math.nan
    before_efficiency: float = math.nan
    predicted_seconds: float = math.nan
    predicted_efficiency: float = math.nan
    first_step: int = -1
    last_step: int = -1
    measured: tuple[float, ...] = ()
    gain: float = -1.0
    undoes: str = ""
    end: str = ""
    cause: str = ""
    ended_by: int = 0

    @property
    def measured_seconds(self) -> float:
        """Return the median step time under the plan; NaN before the first look."""
        return statistics.median(self.measured) if self.measured else math.nan

    @property
    def steps(self) -> int:
        """Return the steps that were reported under the plan."""
        return self.last_step - self.first_step + 1 if self.first_step >= 0 else 0

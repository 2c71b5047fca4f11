"""What the controller knows of one rank."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gradpilot.protos.messages import BucketReport, ComputeSample, Hello, Report

RECENT_REPORTS = 5
"""Windows remembered of each rank."""


@dataclass(slots=True)
class Member:
    """One rank of a run.

    Attributes:
        hello: Its newest hello.
        connected: Whether a session is open.
        layout: Digest of its newest catalog; empty before the first.
        calibration: From that catalog.
        reports: Recent windows on that layout.
        buckets: Newest report per bucket, see ``window.merge_buckets``.
        sequence: Number of its newest report in this session.
        fresh: Whether it reported a usable window since the last decision.
    """

    hello: Hello
    connected: bool = False
    layout: str = ""
    calibration: tuple[ComputeSample, ...] = ()
    reports: deque[Report] = field(default_factory=lambda: deque(maxlen=RECENT_REPORTS))
    buckets: tuple[BucketReport, ...] = ()
    sequence: int = -1
    fresh: bool = False

    def under(self, key: tuple[int, int]) -> list[Report]:
        """Return its recent windows under a plan, newest last."""
        return [r for r in self.reports if (r.plan_term, r.plan_id) == key]

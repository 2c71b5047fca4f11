"""Which buckets matter too much for their contributions to be skipped (selective SkipReduce).

A bucket's *share* is the part of its elements that belong to the largest quarter of all elements of
the gradient by magnitude; one quarter on average. The published method (Kasan et al., MICRO 2025)
takes it once, after the first epoch, and protects the layers where it is large. Gradients change,
so here it is measured again and again: shares are smoothed, a bucket enters the protected set above
one bound and leaves it below a lower one, and the overlap of successive sets is kept, which says
how much the single measurement would have missed.

Magnitudes come as histograms over powers of two, added up over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradpilot.errors import ConfigError

TOP = 0.25
"""The part of all elements that counts as large."""

WEIGHT = 0.3
"""Weight of a new share in the moving average: old ones fade within about 10 measurements."""

ENTER, LEAVE = 0.5, 0.4
"""Shares at which a bucket becomes, and stops being, protected: twice the average, and less."""


@dataclass(frozen=True, slots=True)
class Share:
    """The smoothed share of a bucket, named by its fingerprint."""

    bucket: str
    share: float


@dataclass(frozen=True, slots=True)
class Importance:
    """What is known so far.

    Attributes:
        shares: Smoothed share per bucket, in layout order.
        protected: Fingerprints of buckets that must not skip, in the order of ``shares``.
        overlap: Jaccard overlap of the last two protected sets, 1 if both are empty.
        since_first: The same of the present set and the first one, which is what the one-shot
            choice would still use.
        measurements: How often shares were measured.
        first: The first protected set.
    """

    shares: tuple[Share, ...] = ()
    protected: tuple[str, ...] = ()
    overlap: float = 1.0
    since_first: float = 1.0
    measurements: int = 0
    first: tuple[str, ...] = ()


def top_shares(histograms: Sequence[Sequence[int]], top: float = TOP) -> list[float]:
    """Return the part of each bucket's elements that lies in the global ``top`` by magnitude.

    Args:
        histograms: Elements per bin of magnitude, ascending, one row per bucket, all of one length.
        top: Part of all elements, (0, 1).

    Returns:
        A share in [0, 1] per bucket, 0 for an empty one. Within the bin that holds the bound all
        elements are taken in equal part.

    Raises:
        ConfigError: Rows differ in length, or ``top`` is out of bounds.
    """
    if not 0.0 < top < 1.0:
        raise ConfigError(f"top must lie in (0, 1), got {top!r}")
    if len({len(row) for row in histograms}) > 1:
        raise ConfigError("histograms of buckets differ in length; they must have the same bins")
    counts = np.array(histograms, dtype=np.float64)
    if counts.size == 0 or counts.sum() == 0:
        return [0.0] * len(histograms)
    per_bin = counts.sum(axis=0)
    wanted = top * per_bin.sum()
    above = np.concatenate([np.cumsum(per_bin[::-1])[::-1][1:], [0.0]])
    taken = np.clip(wanted - above, 0.0, per_bin)
    part = np.divide(taken, per_bin, out=np.zeros_like(taken), where=per_bin > 0)
    elements = counts.sum(axis=1)
    large = counts @ part
    shares = np.divide(large, elements, out=np.zeros_like(large), where=elements > 0)
    return [float(share) for share in shares]


def measure(
    before: Importance,
    buckets: Sequence[str],
    histograms: Sequence[Sequence[int]],
    *,
    once: bool = False,
) -> Importance:
    """Return what is known after another measurement.

    Args:
        before: What was known; buckets that are no more are forgotten.
        buckets: Fingerprints, in the order of ``histograms``.
        histograms: See ``top_shares``.
        once: Keep the first protected set forever, as published; shares and overlaps go on, so
            that the two can be compared.
    """
    known = {s.bucket: s.share for s in before.shares}
    protected = set(before.protected)
    shares = []
    for name, new in zip(buckets, top_shares(histograms), strict=True):
        old = known.get(name, new)
        shares.append(Share(name, old + WEIGHT * (new - old)))
    fresh = tuple(
        s.bucket for s in shares if s.share >= (LEAVE if s.bucket in protected else ENTER)
    )
    first = before.first if before.measurements else fresh
    return Importance(
        shares=tuple(shares),
        protected=first if once else fresh,
        overlap=_jaccard(before.protected, fresh) if before.measurements else 1.0,
        since_first=_jaccard(first, fresh),
        measurements=before.measurements + 1,
        first=first,
    )


def _jaccard(a: Sequence[str], b: Sequence[str]) -> float:
    """Return |A and B| / |A or B|, 1 for two empty sets."""
    union = set(a) | set(b)
    return len(set(a) & set(b)) / len(union) if union else 1.0

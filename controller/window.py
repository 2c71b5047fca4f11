"""Aggregates over ranks: what the newest windows of all ranks say about one model.

Ranks step together, so the slowest governs compute and compression (maximum over ranks), nobody
waits in the fastest transfer (minimum), and everything else is a mean or median.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gradpilot.policies.base import BucketState
from gradpilot.protos.messages import (
    ENERGY_RATIOS,
    MAGNITUDE_BINS,
    BucketReport,
    ComputeSample,
    Layout,
    Plan,
    Report,
    Setting,
)

COMPUTE_KEYS = 4096
"""(family, ratio, elements) whose measured seconds are remembered; least recently used go first."""

COMPUTE_RECENT = 4
"""Windows remembered of each; policies take the median of a few."""

_ComputeKey = tuple[str, tuple[Setting, ...], float, int]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a step costs now, measured.

    Attributes:
        step_seconds: Median step time, median over ranks.
        compute_seconds: Step time less exposed time of the slowest rank.
        exposed_seconds: Median over ranks.
        compression_seconds: Compress and decompress of all buckets, slowest rank.
        synchronisation_seconds: Collectives of all buckets, minimum over ranks.
        straggle_seconds: Median over ranks less that minimum, all buckets.
        wire_ratio: Wire bytes / dense fp32 bytes of a step.
        gain: Over the whole gradient, weighted by energy; -1 if not sampled.
        loss: Newest loss, mean over the ranks whose loss is finite; infinite if no rank's is, NaN
            if none gave one.
        lr: Newest learning rate, largest of the ranks; NaN if none gave one.
    """

    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    compression_seconds: float
    synchronisation_seconds: float
    straggle_seconds: float
    wire_ratio: float
    gain: float
    loss: float
    lr: float


def merge_buckets(
    known: Sequence[BucketReport], new: Sequence[BucketReport], *, same_plan: bool
) -> tuple[BucketReport, ...]:
    """Return the newest report per bucket, with what it did not sample taken from the ones before.

    Args:
        known: Result of the last call; empty at first.
        new: Buckets of the newest report.
        same_plan: Whether both are under one plan; gain and residual belong to the option.
    """
    if len(known) != len(new):
        return tuple(new)
    merged = []
    for old, now in zip(known, new, strict=True):
        if now.gradient_sq < 0:
            now = replace(now, gradient_sq=old.gradient_sq)
        if not now.energy:
            now = replace(now, energy=old.energy)
        if not now.magnitudes:
            now = replace(now, magnitudes=old.magnitudes)
        if same_plan and now.gain < 0:
            now = replace(now, gain=old.gain)
        if same_plan and now.residual_sq < 0:
            now = replace(now, residual_sq=old.residual_sq)
        if same_plan and now.mean_sq < 0:
            now = replace(now, mean_sq=old.mean_sq)
        merged.append(now)
    return tuple(merged)


def bucket_states(
    layout: Layout, ranks: Sequence[Sequence[BucketReport]]
) -> tuple[BucketState, ...]:
    """Return the state per bucket in layout order.

    Args:
        layout: Present layout, B buckets.
        ranks: Merged bucket reports of each rank, B each.
    """
    if not ranks:
        return tuple(BucketState() for _ in layout.buckets)
    return tuple(_bucket_state([rank[b] for rank in ranks]) for b in range(len(layout.buckets)))


def measured(
    layout: Layout, windows: Sequence[Sequence[Report]], ranks: Sequence[Sequence[BucketReport]]
) -> Measured | None:
    """Return what a step costs.

    Args:
        layout: Present layout, B buckets.
        windows: Recent reports under one plan of each rank that has any.
        ranks: Merged bucket reports of the same ranks, B each.

    Returns:
        None if no rank has reported.
    """
    if not windows:
        return None
    compression = max(
        (sum(b.compress_seconds + b.decompress_seconds for b in rank) for rank in ranks),
        default=0.0,
    )
    transfer, straggle = 0.0, 0.0
    for b in range(len(layout.buckets)):
        seconds = [rank[b].wire_seconds for rank in ranks]
        transfer += min(seconds)
        straggle += statistics.median(seconds) - min(seconds)
    dense = 4 * layout.elements
    wire = statistics.fmean(sum(b.wire_bytes for b in rank) for rank in ranks)
    rates = [w[-1].lr for w in windows if not math.isnan(w[-1].lr)]
    return Measured(
        step_seconds=statistics.median(_median(w, "step_seconds") for w in windows),
        compute_seconds=max(_median(w, "compute_seconds") for w in windows),
        exposed_seconds=statistics.median(_median(w, "exposed_seconds") for w in windows),
        compression_seconds=compression,
        synchronisation_seconds=transfer,
        straggle_seconds=straggle,
        wire_ratio=wire / dense if dense else 0.0,
        gain=_total_gain(bucket_states(layout, ranks)),
        loss=_mean_loss([w[-1].loss for w in windows]),
        lr=max(rates, default=math.nan),
    )


class ComputeTable:
    """Seconds of compressors: calibrated at attach, refined by every window. Memory is bounded."""

    def __init__(self) -> None:
        self._calibrated: OrderedDict[_ComputeKey, ComputeSample] = OrderedDict()
        self._measured: OrderedDict[_ComputeKey, deque[ComputeSample]] = OrderedDict()

    def calibrate(self, ranks: Iterable[Iterable[ComputeSample]]) -> None:
        """Take the calibration of all ranks, in place of earlier ones; the slowest governs."""
        self._calibrated.clear()
        for samples in ranks:
            for sample in samples:
                key = _key(sample)
                known = self._calibrated.get(key)
                self._calibrated[key] = _slower(known, sample) if known else sample
                if len(self._calibrated) > COMPUTE_KEYS:
                    self._calibrated.popitem(last=False)

    def refine(self, layout: Layout, plan: Plan, ranks: Sequence[Sequence[BucketReport]]) -> None:
        """Take what all ranks measured under the options in force."""
        if not ranks:
            return
        found: dict[_ComputeKey, list[tuple[float, float]]] = {}
        for b, bucket in enumerate(layout.buckets):
            option = plan.option(bucket.fingerprint)
            compress = max(rank[b].compress_seconds for rank in ranks)
            decompress = max(rank[b].decompress_seconds for rank in ranks)
            key = (option.compressor, option.settings, option.ratio, bucket.elements)
            found.setdefault(key, []).append((compress, decompress))
        for key, pairs in found.items():
            compress, decompress = (statistics.median(p[i] for p in pairs) for i in (0, 1))
            recent = self._measured.setdefault(key, deque(maxlen=COMPUTE_RECENT))
            recent.append(ComputeSample(*key, compress, decompress))
            self._measured.move_to_end(key)
            if len(self._measured) > COMPUTE_KEYS:
                self._measured.popitem(last=False)

    def samples(self) -> tuple[ComputeSample, ...]:
        """Return calibration first, then measurements, oldest first."""
        refined = [sample for recent in self._measured.values() for sample in recent]
        return (*self._calibrated.values(), *refined)


def _bucket_state(reports: Sequence[BucketReport]) -> BucketState:
    curves = [r.energy for r in reports if len(r.energy) == len(ENERGY_RATIOS)]
    counts = [r.magnitudes for r in reports if len(r.magnitudes) == MAGNITUDE_BINS]
    return BucketState(
        ready_seconds=statistics.median(r.ready_seconds for r in reports),
        gain=_mean_known([r.gain for r in reports]),
        gradient_sq=_mean_known([r.gradient_sq for r in reports]),
        residual_sq=_mean_known([r.residual_sq for r in reports]),
        energy=tuple(statistics.fmean(column) for column in zip(*curves, strict=True)),
        magnitudes=tuple(sum(column) for column in zip(*counts, strict=True)),
        mean_sq=_mean_known([r.mean_sq for r in reports]),
    )


def _total_gain(states: Sequence[BucketState]) -> float:
    known = [s for s in states if s.gain >= 0]
    if not known:
        return -1.0
    weights = [max(s.gradient_sq, 0.0) for s in known]
    if not sum(weights):
        return statistics.fmean(s.gain for s in known)
    return statistics.fmean([s.gain for s in known], weights)


def _mean_loss(losses: Sequence[float]) -> float:
    """Return the mean of the finite ones: a rank that overflowed must not hide the others."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite:
        return statistics.fmean(finite)
    return math.nan if all(map(math.isnan, losses)) else math.inf


def _mean_known(values: Sequence[float]) -> float:
    known = [v for v in values if v >= 0]
    return statistics.fmean(known) if known else -1.0


def _median(reports: Sequence[Report], name: str) -> float:
    return float(statistics.median(getattr(r, name) for r in reports))


def _key(sample: ComputeSample) -> _ComputeKey:
    return (sample.compressor, sample.settings, sample.ratio, sample.elements)


def _slower(one: ComputeSample, other: ComputeSample) -> ComputeSample:
    return replace(
        one,
        compress_seconds=max(one.compress_seconds, other.compress_seconds),
        decompress_seconds=max(one.decompress_seconds, other.decompress_seconds),
    )

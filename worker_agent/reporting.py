"""From stamps of the gradient path to window reports.

The hook calls ``WindowRecorder`` many times a step, so each call only stores a few numbers; medians
are taken once per window. One thread may stamp readiness while another stamps completion, as the
hook and the communication thread do; ``end_step`` comes after both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gradpilot.protos.messages import BucketReport, Counters, Layout, Report, WireSample

MAX_SAMPLES = 64
"""Most collectives that one report lists one by one."""

_ROWS = 32
"""Newest steps of a window that medians are taken over; bounds memory and time."""

_WARM_UP_STEPS = 2
"""Steps after the start that are not representative: allocation, DDP's rebuilding of buckets."""

_FRESH_STEPS = 16
"""Steps after a change that are all sampled: what they show is news to the controller."""

_ODD = 5.0
"""A gap before the next step this many times the usual one is something other than training."""

_PATIENCE = 3
"""So many odd gaps in a row are the new normal."""


@dataclass(frozen=True, slots=True)
class BucketStatistics:
    """What was found in one bucket of one step; see ``messages.BucketReport``."""

    gain: float = -1.0
    gradient_sq: float = -1.0
    residual_sq: float = -1.0
    energy: tuple[float, ...] = ()
    magnitudes: tuple[int, ...] = ()
    mean_sq: float = -1.0


@dataclass(slots=True)
class _Row:
    """Stamps of one step by bucket: seconds, and bytes on the wire."""

    ready: dict[int, float] = field(default_factory=dict)
    compress: dict[int, float] = field(default_factory=dict)
    decompress: dict[int, float] = field(default_factory=dict)
    wire: dict[int, float] = field(default_factory=dict)
    wire_bytes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Duration:
    """How long one step took, seconds.

    Attributes:
        step: From its first ready bucket to the next step's.
        exposed: From its last ready bucket to the end of its communication.
        gap: From there to the next step's first ready bucket.
    """

    step: float
    exposed: float
    gap: float


@dataclass(slots=True)
class _Window:
    """What was kept of the steps since the last report."""

    start: float | None = None
    first: int = -1
    last: int = -1
    rows: deque[_Row] = field(default_factory=lambda: deque(maxlen=_ROWS))
    durations: deque[_Duration] = field(default_factory=lambda: deque(maxlen=_ROWS))
    samples: list[WireSample] = field(default_factory=list)
    statistics: dict[int, BucketStatistics] = field(default_factory=dict)


class WindowRecorder:
    """Collects the stamps of one rank and closes a window every few seconds.

    Nothing counts while the layout has no buckets, and a window never spans a change of plan or
    layout. Steps that are not representative are left out of everything: the first two, the first
    under a new plan, the one in which the layout changed. A step is kept when the next one begins,
    since only then its duration is known; so a window that closes at the end of a step ends before
    that step.

    Args:
        layout: Layout of the first step; without buckets if it is not known yet.
        counters: Called once per report for the totals.
        report_seconds: Least time that a window lasts; may be changed at any moment.
        sample_block: Of every block of this many steps, counted from step 0, ...
        sample_steps: ... collectives of the first so many are kept one by one, and of the first 16
            after a change. By step number, so that all ranks keep the same ones and the controller
            can join them.

    Attributes:
        report_seconds: See above.
        sampling: Whether the collectives of the present step are wanted.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        counters: Callable[[], Counters] = Counters,
        report_seconds: float = 5.0,
        sample_block: int = 32,
        sample_steps: int = 4,
    ) -> None:
        self.report_seconds = report_seconds
        self.sampling = False
        self._counters = counters
        self._longest_block = self._block = sample_block
        self._block_steps = sample_steps
        self._layout = layout
        self._plan = (-1, -1)
        self._sequence = 0
        self._loss = self._lr = math.nan
        # The present step.
        self._step = -1
        self._begin = self._done = self._exposed = 0.0
        self._counts = False
        self._ended = False
        self._row = _Row()
        self._row_samples: list[WireSample] = []
        # The present window, and what outlives it.
        self._window = _Window()
        self._probes: deque[WireSample] = deque(maxlen=MAX_SAMPLES // 2)
        self._hurried = False
        self._exclude = _WARM_UP_STEPS
        self._fresh_from: int | None = None
        self._gaps: deque[float] = deque(maxlen=_ROWS)
        self._odd_gaps = 0

    # --- what the hook says --------------------------------------------------------------------

    def begin_step(self, step: int, t: float) -> None:
        """The first bucket of ``step`` is ready at ``t`` (seconds of a monotonic clock)."""
        if self._counts and self._ended:
            self._keep(t)
        self._counts = bool(self._layout.buckets) and not self._exclude
        if self._exclude:
            self._exclude -= 1
        if self._counts:
            if self._fresh_from is None:
                self._fresh_from = step
            if self._window.start is None:
                self._window.start = t
            self.sampling = (
                step % self._block < self._block_steps or step - self._fresh_from < _FRESH_STEPS
            )
        else:
            self.sampling = False
        self._step, self._begin, self._ended = step, t, False
        self._row = _Row()
        self._row_samples = []

    def steps_without_samples(self, step: int) -> int:
        """Return for how many steps from ``step`` on, the next one, no collective is wanted."""
        fresh = self._fresh_from
        if self._exclude or fresh is None or step - fresh < _FRESH_STEPS:
            return 0
        into_block = step % self._block
        return self._block - into_block if into_block >= self._block_steps else 0

    def bucket_ready(self, index: int, t: float) -> None:
        """Bucket ``index`` is ready at ``t``; one that the layout does not know is not reported."""
        self._row.ready[index] = t - self._begin

    def bucket_done(
        self,
        index: int,
        compress_seconds: float,
        decompress_seconds: float,
        wire_seconds: float,
        wire_bytes: int,
    ) -> None:
        """Bucket ``index`` has its mean; see ``BucketReport`` for the numbers."""
        row = self._row
        row.compress[index] = compress_seconds
        row.decompress[index] = decompress_seconds
        row.wire[index] = wire_seconds
        row.wire_bytes[index] = wire_bytes

    def sample(self, sample: WireSample) -> None:
        """Keep one collective of a step for which ``sampling`` is set, or of a probe (bucket -1).

        Probes may come between two steps.
        """
        if sample.bucket < 0:
            self._probes.append(sample)
        elif self.sampling:
            self._row_samples.append(sample)

    def hurry(self) -> None:
        """End the window with the present step: the controller waits for what a probe found."""
        self._hurried = True

    def bucket_statistics(self, index: int, statistics: BucketStatistics) -> None:
        """Statistics of bucket ``index`` were taken; the newest of a window are reported.

        Those of a non-finite gradient are ignored: the controller would refuse the whole report.
        """
        s = statistics
        values = (s.gain, s.gradient_sq, s.residual_sq, s.mean_sq, *s.energy)
        if self._counts and all(map(math.isfinite, values)):
            self._window.statistics[index] = s

    def end_step(self, t_last_ready: float, t_done: float) -> Report | None:
        """The step's last bucket was ready at ``t_last_ready``; all had their mean at ``t_done``.

        Returns:
            The report of the window that ends here, or None if it goes on.
        """
        self._done = t_done
        self._exposed = max(t_done - t_last_ready, 0.0)
        self._ended = True
        start = self._window.start
        if start is None:
            return None
        if t_done - start < self.report_seconds and not self._hurried:
            return None
        return self._close(t_done)

    # --- changes between two steps -------------------------------------------------------------

    def set_plan(self, plan: tuple[int, int], interval: int | None = None) -> Report | None:
        """Note that the next step runs under the plan with this ``(term, id)``.

        Args:
            plan: Term and id.
            interval: Its decision step if that is short because steps are slow; blocks are then no
                longer either, so that every decision finds collectives that are news.

        Returns:
            The report of the window that a change ends, None if there is nothing to report.
        """
        if plan == self._plan:
            return None
        report = self._cut()
        self._plan = plan
        self._block = min(self._longest_block, interval or self._longest_block)
        self._exclude = max(self._exclude, 1)
        return report

    def set_layout(self, layout: Layout) -> Report | None:
        """Note that the step that just ended showed this layout; returns like ``set_plan``."""
        if layout.digest == self._layout.digest:
            return None
        report = self._cut()
        self._layout = layout
        return report

    def observe(self, *, loss: float | None = None, lr: float | None = None) -> None:
        """Note the newest loss and learning rate."""
        if loss is not None:
            self._loss = loss
        if lr is not None:
            self._lr = lr

    # --- windows -------------------------------------------------------------------------------

    def _keep(self, t: float) -> None:
        """Add the step that ended to the window; the next one begins at ``t``."""
        window = self._window
        if window.first < 0:
            window.first = self._step
        window.last = self._step
        window.rows.append(self._row)
        window.durations.append(_Duration(t - self._begin, self._exposed, t - self._done))
        if self._row_samples:
            window.samples += self._row_samples
            if len(window.samples) > 4 * MAX_SAMPLES:
                window.samples = _choose(window.samples, MAX_SAMPLES)

    def _cut(self) -> Report | None:
        """End the window before its time and without the newest step.

        Before a new plan that step's duration is not its own, before a new layout nothing of it is.
        """
        report = self._close(self._done)
        self._window = _Window()
        self._counts = self.sampling = False
        self._fresh_from = None
        return report

    def _close(self, now: float) -> Report | None:
        window = self._window
        durations = self._undisturbed(window)
        if not durations:
            return None  # nothing is known of the step time yet: the window goes on
        term, plan_id = self._plan
        probes = tuple(self._probes)
        report = Report(
            layout=self._layout.digest,
            sequence=self._sequence,
            first_step=window.first,
            last_step=window.last,
            plan_term=term,
            plan_id=plan_id,
            step_seconds=_median(d.step for d in durations),
            compute_seconds=_median(max(d.step - d.exposed, 0.0) for d in durations),
            exposed_seconds=_median(d.exposed for d in durations),
            samples=(*_choose(window.samples, MAX_SAMPLES - len(probes)), *probes),
            buckets=tuple(_bucket(window, bucket.index) for bucket in self._layout.buckets),
            counters=self._counters(),
            loss=self._loss,
            lr=self._lr,
        )
        self._sequence += 1
        self._probes.clear()
        self._hurried = False
        self._window = _Window(start=now)
        return report

    def _undisturbed(self, window: _Window) -> list[_Duration]:
        """Take the durations of the steps that no evaluation or checkpoint interrupted.

        Only the gap between two steps is judged: a slower network stretches the other part, and
        that is what must be seen. The gaps of earlier windows are known too, so that a window of
        one interrupted step is recognised; odd gaps that persist become the norm.
        """
        usual = _median([*self._gaps, *(d.gap for d in window.durations)])
        kept = []
        for duration in window.durations:
            odd = duration.gap > _ODD * usual
            self._odd_gaps = self._odd_gaps + 1 if odd else 0
            if odd and self._odd_gaps == _PATIENCE:
                self._gaps.clear()
            if not odd or self._odd_gaps >= _PATIENCE:
                kept.append(duration)
                self._gaps.append(duration.gap)
        window.durations.clear()
        return kept


def _bucket(window: _Window, index: int) -> BucketReport:
    rows = window.rows
    known = window.statistics.get(index, BucketStatistics())
    return BucketReport(
        bucket=index,
        ready_seconds=_median(r.ready[index] for r in rows if index in r.ready),
        compress_seconds=_median(r.compress[index] for r in rows if index in r.compress),
        decompress_seconds=_median(r.decompress[index] for r in rows if index in r.decompress),
        wire_seconds=_median(r.wire[index] for r in rows if index in r.wire),
        wire_bytes=rows[-1].wire_bytes.get(index, 0),
        gain=min(known.gain, 1.0),  # fp32 sums may end just above 1
        gradient_sq=known.gradient_sq,
        residual_sq=known.residual_sq,
        energy=known.energy,
        magnitudes=known.magnitudes,
        mean_sq=known.mean_sq,
    )


def _choose(samples: list[WireSample], most: int) -> list[WireSample]:
    """Return at most so many of them, in order, by a rule that is equal on all ranks.

    The windows of two ranks end at slightly different steps, so "the first 64" would differ. A
    number mixed from ``(step, bucket, round)`` orders all collectives alike everywhere; each rank
    keeps the smallest, and where windows overlap they keep the same ones.
    """
    if len(samples) <= most:
        return samples
    last = sorted(map(_mixed, samples))[most - 1]
    return [s for s in samples if _mixed(s) <= last][:most]


def _mixed(sample: WireSample) -> int:
    x = sample.step * 0x9E3779B97F4A7C15 + sample.bucket * 0xC2B2AE3D27D4EB4F + sample.round
    x = ((x ^ (x >> 29)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return ((x ^ (x >> 32)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF


def _median(values: Iterable[float]) -> float:
    """Return the lower median of the finite values; 0 if there are none."""
    finite = sorted(filter(math.isfinite, values))
    return finite[(len(finite) - 1) // 2] if finite else 0.0

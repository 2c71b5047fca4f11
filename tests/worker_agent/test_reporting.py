from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.protos.messages import MAGNITUDE_BINS, Bucket, Counters, Layout, Report, WireSample
from gradpilot.protos.validate import validate_report
from gradpilot.worker_agent.reporting import (
    MAX_SAMPLES,
    BucketStatistics,
    WindowRecorder,
    _choose,
)

LAYOUT = Layout.of((Bucket("a", 0, 100), Bucket("b", 1, 50)))
OTHER = Layout.of((Bucket("c", 0, 150),))


class Job:
    """Runs steps of a fixed shape through a recorder on a clock of its own."""

    def __init__(
        self,
        recorder: WindowRecorder | None = None,
        *,
        layout: Layout = LAYOUT,
        report_seconds: float = 1.0,
        compute: float = 0.08,
        wire: float = 0.02,
    ) -> None:
        self.recorder = recorder or WindowRecorder(
            layout, report_seconds=report_seconds, counters=lambda: Counters(steps=self.number)
        )
        self.layout = layout
        self.compute, self.wire = compute, wire
        self.number = 0
        self.now = 100.0
        self.plan = (1, 1)
        self.reports: list[Report] = []
        self.sampled: list[int] = []

    def step(self, *, gap: float = 0.0, rounds: int = 1, new_layout: Layout | None = None) -> None:
        """One step of ``compute + wire`` seconds, the last bucket ready after half the compute."""
        r = self.recorder
        self.take(r.set_plan(self.plan))
        r.begin_step(self.number, self.now)
        if r.sampling:
            self.sampled.append(self.number)
        buckets = (new_layout or self.layout).buckets
        for bucket in buckets:
            self.now += self.compute / 2 / len(buckets)
            r.bucket_ready(bucket.index, self.now)
        last_ready = self.now
        for bucket in buckets:
            self.now += self.wire / len(buckets)
            r.bucket_done(bucket.index, 0.001, 0.002, self.wire / len(buckets), 4 * bucket.elements)
            for number in range(rounds):
                r.sample(
                    WireSample(self.number, bucket.index, number, "all_reduce", 8, 0, self.wire)
                )
        self.take(r.end_step(last_ready, self.now))
        if new_layout is not None:
            self.layout = new_layout
            self.take(r.set_layout(new_layout))
        self.now += self.compute / 2 + gap
        self.number += 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def take(self, report: Report | None) -> None:
        if report is not None:
            layout = next(known for known in (LAYOUT, OTHER) if known.digest == report.layout)
            validate_report(report, layout, 2)
            self.reports.append(report)


def test_a_window_tells_step_compute_and_exposed_time() -> None:
    job = Job()
    job.steps(40)
    report = job.reports[0]
    assert report.step_seconds == pytest.approx(0.10)
    assert report.exposed_seconds == pytest.approx(0.02)
    assert report.compute_seconds == pytest.approx(0.08)
    first, second = report.buckets
    assert first.ready_seconds == pytest.approx(0.02)
    assert second.ready_seconds == pytest.approx(0.04)
    assert (first.compress_seconds, first.decompress_seconds) == (0.001, 0.002)
    assert first.wire_seconds == pytest.approx(0.01)
    assert (first.wire_bytes, second.wire_bytes) == (400, 200)
    assert (first.gain, first.energy) == (-1.0, ())
    assert (report.plan_term, report.plan_id, report.layout) == (1, 1, LAYOUT.digest)


def test_windows_close_in_time_follow_each_other_and_count() -> None:
    job = Job()
    job.steps(60)
    assert len(job.reports) == 5
    for before, after in zip(job.reports, job.reports[1:], strict=False):
        assert after.sequence == before.sequence + 1
        assert after.first_step == before.last_step + 1
        assert after.counters.steps == after.last_step + 1  # closed while the next step ran
    assert math.isnan(job.reports[0].loss)


def test_the_interval_may_change_while_it_runs() -> None:
    job = Job()
    job.recorder.report_seconds = 0.25
    job.steps(30)
    assert len(job.reports) > 8


def test_the_first_two_steps_do_not_count() -> None:
    job = Job()
    job.step(gap=50.0)
    job.step(gap=50.0)
    job.steps(20)
    assert job.reports[0].first_step == 2
    assert job.reports[0].step_seconds == pytest.approx(0.10)
    assert min(s.step for s in job.reports[0].samples) == 2


def test_nothing_counts_before_the_layout_is_known() -> None:
    job = Job(WindowRecorder(Layout.of(()), report_seconds=1.0))
    job.steps(30)
    assert not job.reports
    job.step(new_layout=LAYOUT)
    job.steps(20)
    assert job.reports[0].first_step == 31


def test_a_new_plan_ends_the_window_and_its_first_step_does_not_count() -> None:
    job = Job(report_seconds=3.0)
    job.steps(12)
    job.plan = (1, 2)
    job.wire = 0.5
    job.step()
    job.wire = 0.04
    job.steps(40)
    old, new = job.reports[:2]
    assert (old.plan_id, old.first_step, old.last_step) == (1, 2, 10)
    assert (new.plan_id, new.first_step) == (2, 13)
    assert old.step_seconds == pytest.approx(0.10)
    assert new.step_seconds == pytest.approx(0.12)
    assert {s.step for r in job.reports for s in r.samples}.isdisjoint({11, 12})


def test_a_plan_that_is_changed_at_once_leaves_nothing_to_report() -> None:
    job = Job()
    for number in range(10):
        job.plan = (1, number)
        job.step()
    assert not job.reports


def test_a_new_layout_ends_the_window_without_the_step_that_showed_it() -> None:
    job = Job(report_seconds=0.5)
    job.steps(6)
    job.step(new_layout=OTHER)
    job.steps(20)
    old, new = job.reports[:2]
    assert (old.layout, old.last_step) == (LAYOUT.digest, 5)
    assert (new.layout, new.first_step) == (OTHER.digest, 7)
    assert [b.wire_bytes for b in new.buckets] == [600]


def test_the_same_layout_and_plan_again_change_nothing() -> None:
    job = Job()
    job.steps(5)
    assert job.recorder.set_layout(LAYOUT) is None
    assert job.recorder.set_plan((1, 1)) is None
    job.steps(9)
    assert job.reports[0].first_step == 2


def test_an_evaluation_between_steps_does_not_spoil_the_medians() -> None:
    job = Job(report_seconds=0.25)  # two or three steps a window
    job.steps(12)
    for _ in range(5):
        job.step(gap=30.0)
        job.steps(4)
    assert len(job.reports) > 10
    assert all(r.step_seconds == pytest.approx(0.10) for r in job.reports)


def test_a_window_of_one_interrupted_step_waits_for_another() -> None:
    job = Job(report_seconds=0.05)  # a report each step
    job.steps(10)
    before = len(job.reports)
    job.step(gap=30.0)
    job.step()
    assert len(job.reports) == before + 1
    job.steps(3)
    assert all(r.step_seconds == pytest.approx(0.10) for r in job.reports)


def test_slower_training_is_believed_after_three_steps() -> None:
    job = Job(report_seconds=0.25)
    job.steps(20)
    job.compute = 2.0  # gaps of 1 s instead of 40 ms
    job.steps(12)
    assert job.reports[-1].step_seconds == pytest.approx(2.02)


def test_a_slower_network_is_seen_at_once() -> None:
    job = Job(report_seconds=0.25)
    job.steps(20)
    count = len(job.reports)
    job.wire = 3.0
    job.steps(3)
    assert job.reports[count + 1].exposed_seconds == pytest.approx(3.0)
    assert job.reports[count + 1].step_seconds == pytest.approx(3.08)


def test_sampled_steps_follow_from_the_step_number_alone() -> None:
    fast, slow = Job(), Job(report_seconds=7.0, compute=0.3)
    fast.steps(200)
    slow.steps(200)
    assert fast.sampled == slow.sampled
    late = [s for s in fast.sampled if s >= 18]
    assert late == [s for s in range(18, 200) if s % 32 < 4]
    assert fast.sampled[:16] == list(range(2, 18))


def test_steps_after_a_switch_are_all_sampled() -> None:
    job = Job()
    job.steps(45)
    job.plan = (1, 2)
    job.steps(30)
    assert set(range(46, 62)) <= set(job.sampled)
    assert 45 not in job.sampled


def test_a_report_lists_few_samples_and_the_same_ones_on_every_rank() -> None:
    here, there = Job(report_seconds=0.8), Job(report_seconds=0.9)
    for _ in range(40):
        here.step(rounds=20)
        there.step(rounds=20)
    mine, theirs = here.reports[0], there.reports[0]
    assert len(mine.samples) == len(theirs.samples) == MAX_SAMPLES

    def kept(report: Report) -> set[tuple[int, int, int]]:
        return {(s.step, s.bucket, s.round) for s in report.samples if s.step <= mine.last_step}

    assert mine.last_step < theirs.last_step
    assert kept(theirs) <= kept(mine)
    assert len(kept(theirs)) > MAX_SAMPLES / 2
    keys = [(s.step, s.bucket, s.round) for s in mine.samples]
    assert keys == sorted(keys)


@settings(deadline=None, max_examples=60)
@given(
    first=st.integers(0, 10_000),
    windows=st.tuples(st.integers(0, 30), st.integers(1, 80)),
    rounds=st.integers(1, 5),
)
def test_what_a_long_window_keeps_a_shorter_one_within_it_keeps_too(
    first: int, windows: tuple[int, int], rounds: int
) -> None:
    skipped, length = windows
    stream = [
        WireSample(step, bucket, number, "all_reduce", 8, 0, 0.1)
        for step in range(first, first + length)
        for bucket in range(3)
        for number in range(rounds)
    ]
    within = [s for s in stream if s.step >= first + skipped]
    long, short = _choose(stream, MAX_SAMPLES), _choose(within, MAX_SAMPLES)
    assert len(long) == min(len(stream), MAX_SAMPLES)
    assert set(long) & set(within) <= set(short)
    assert [s for s in stream if s in set(long)] == long


def test_windows_of_two_ranks_that_are_a_little_apart_keep_mostly_the_same_samples() -> None:
    def window(first: int) -> list[WireSample]:
        return [
            WireSample(step, bucket, number, "all_reduce", 8, 0, 0.1)
            for step in range(first, first + 20)
            for bucket in range(10)
            for number in range(4)
        ]

    mine, theirs = (set(_choose(window(first), MAX_SAMPLES)) for first in (1000, 1002))
    assert len(mine & theirs) >= 0.8 * MAX_SAMPLES  # nine tenths of the windows overlap
    assert len({s.step for s in mine}) > 15
    assert len({s.bucket for s in mine}) == 10


def test_probes_are_reported_whenever_they_came() -> None:
    job = Job()
    job.steps(5)
    job.plan = (1, 2)
    probe = WireSample(5, -1, 0, "all_reduce", 1024, 0, 0.01)
    job.recorder.sample(probe)  # between two steps, before a switch that ends the window
    for _ in range(40):
        job.step(rounds=50)
    listed = [s for r in job.reports for s in r.samples if s.bucket < 0]
    assert listed == [probe]
    assert all(len(r.samples) <= MAX_SAMPLES for r in job.reports)


def test_a_probe_ends_the_window_with_its_step() -> None:
    job = Job()
    job.steps(5)
    assert not job.reports
    job.recorder.sample(WireSample(5, -1, 0, "all_reduce", 1024, 0, 0.01))
    job.steps(1)
    assert not job.reports, "nobody waits for that of the start"
    job.recorder.hurry()
    job.steps(1)
    (report,) = job.reports
    assert [s.bucket for s in report.samples].count(-1) == 1
    job.steps(5)
    assert len(job.reports) == 1, "the next one lasts as long as ever"


def test_the_newest_statistics_of_a_window_are_reported() -> None:
    job = Job()
    job.steps(3)
    energy = tuple(i / 12 for i in range(13))
    bins = tuple(range(MAGNITUDE_BINS))
    job.recorder.bucket_statistics(1, BucketStatistics(0.5, 2.0, 3.0, energy, bins, 1.0))
    job.recorder.bucket_statistics(1, BucketStatistics(1.0000001, 4.0, 5.0, energy, bins, 2.0))
    job.recorder.bucket_statistics(0, BucketStatistics(math.nan, 4.0, 5.0, energy))
    job.steps(30)
    first, second = job.reports[0].buckets
    assert (second.gain, second.gradient_sq, second.residual_sq) == (1.0, 4.0, 5.0)
    assert second.energy == energy
    assert (second.magnitudes, second.mean_sq) == (bins, 2.0)
    assert first.gain == -1.0  # of a non-finite gradient
    assert job.reports[1].buckets[1].gain == -1.0


def test_observed_loss_and_rate_are_reported() -> None:
    job = Job()
    job.recorder.observe(loss=2.5)
    job.recorder.observe(lr=0.1)
    job.steps(20)
    assert (job.reports[0].loss, job.reports[0].lr) == (2.5, 0.1)


def test_a_step_that_never_ended_is_forgotten() -> None:
    job = Job()
    job.steps(5)
    job.recorder.begin_step(job.number, job.now)
    job.recorder.bucket_ready(0, job.now + 1)
    job.number += 1
    job.now += 40.0
    job.steps(20)
    assert job.reports[0].step_seconds == pytest.approx(0.10)
    assert job.reports[0].buckets[0].ready_seconds == pytest.approx(0.02)


def test_stamps_that_are_no_numbers_do_not_reach_the_report() -> None:
    job = Job()
    job.steps(3)
    job.recorder.bucket_done(0, math.nan, math.inf, math.nan, 4)
    job.steps(20)
    report = job.reports[0]  # validated when it was taken
    assert report.buckets[0].compress_seconds == 0.001


def test_memory_is_bounded_while_no_window_closes() -> None:
    job = Job(report_seconds=1e9)
    for _ in range(3000):
        job.step(rounds=3)
    window = job.recorder._window
    assert len(window.rows) <= 32
    assert len(window.durations) <= 32
    assert len(window.samples) <= 5 * MAX_SAMPLES


def _micros(call: Callable[[], object], times: int = 20_000) -> float:
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(times):
            call()
        best = min(best, time.perf_counter() - start)
    return 1e6 * best / times


def test_calls_cost_about_a_microsecond() -> None:
    recorder = WindowRecorder(LAYOUT, report_seconds=1e9)
    job = Job(recorder)
    job.steps(40)
    sample = WireSample(1, 0, 0, "all_reduce", 8, 0, 0.1)

    def step() -> None:
        recorder.begin_step(40, 1.0)
        recorder.end_step(1.0, 2.0)

    costs = {
        "bucket_ready": _micros(lambda: recorder.bucket_ready(0, 1.0)),
        "bucket_done": _micros(lambda: recorder.bucket_done(0, 0.1, 0.1, 0.1, 8)),
        "sample": _micros(lambda: recorder.sample(sample)),
        "step": _micros(step),
    }
    # Measured 0.1 .. 0.3, a whole step 2; the bounds leave room for a busy machine.
    assert max(costs["bucket_ready"], costs["bucket_done"], costs["sample"]) < 5, costs
    assert costs["step"] < 20, costs


def test_a_plan_for_slow_steps_is_sampled_more_often() -> None:
    """Of blocks no longer than its decision step; the plan after it has the usual ones again."""

    def sampled(interval: int | None, number: int, recorder: WindowRecorder) -> int:
        recorder.set_plan((1, number), interval)
        taken = 0
        for step in range(100, 260):
            recorder.begin_step(step, float(step))
            taken += recorder.sampling and step >= 164
            recorder.end_step(step + 0.1, step + 0.2)
        return taken

    recorder = WindowRecorder(LAYOUT, sample_block=32, sample_steps=4)
    assert sampled(None, 1, recorder) == 12
    assert sampled(8, 2, recorder) == 48
    assert sampled(2, 3, recorder) == 96
    assert sampled(50, 4, recorder) == 12


@given(
    block=st.integers(1, 40),
    sample_steps=st.integers(1, 8),
    first=st.integers(0, 200),
    plans=st.lists(st.integers(20, 60), min_size=1, max_size=3),
)
def test_steps_without_samples_are_not_sampled(
    block: int, sample_steps: int, first: int, plans: list[int]
) -> None:
    recorder = WindowRecorder(LAYOUT, sample_block=block, sample_steps=sample_steps)
    step, promised = first, 0
    for number, length in enumerate(plans):
        recorder.set_plan((1, number))
        promised = 0  # of the plan before
        for _ in range(length):
            recorder.begin_step(step, float(step))
            assert not (promised and recorder.sampling)
            recorder.end_step(step + 0.1, step + 0.2)
            step += 1
            promised = max(promised - 1, recorder.steps_without_samples(step))
    if block > 30 and plans[-1] == 60 and step % block >= sample_steps:
        assert promised, "of a long block most steps are not sampled"

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.controller.totals import (
    COMPRESSORS,
    DECISION_BUCKETS,
    RECENT_ERRORS,
    SHARED,
    SUMMED,
    DecisionStats,
    PredictionStats,
    Totals,
)
from gradpilot.policies.history import StepError
from gradpilot.protos.messages import Counters

events = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 1000)), min_size=1, max_size=40
)


@given(events)
@settings(deadline=None, max_examples=100)
def test_totals_never_go_backwards(events: list[tuple[int, bool, int]]) -> None:
    totals, before = Totals(), dict.fromkeys((*SUMMED, *SHARED), 0)
    for rank, starts, value in events:
        if starts:
            totals.start(rank, from_zero=value % 2 == 0)
        totals.add(rank, Counters(wire_bytes=value, switches=value))
        after = {name: totals[name] for name in before}
        assert all(after[name] >= before[name] for name in before)
        before = after


def test_ranks_add_up_but_shared_events_count_once() -> None:
    totals = Totals()
    for rank in range(4):
        totals.start(rank, from_zero=True)
        totals.add(rank, Counters(wire_bytes=100, switches=3, nonfinite_steps=rank))
    assert totals["wire_bytes"] == 400
    assert totals["switches"] == 3
    assert totals["nonfinite_steps"] == 3


def test_what_was_before_our_time_does_not_count() -> None:
    totals = Totals()
    totals.start(0, from_zero=False)
    totals.add(0, Counters(wire_bytes=1_000_000))
    assert totals["wire_bytes"] == 0
    totals.add(0, Counters(wire_bytes=1_000_500))
    assert totals["wire_bytes"] == 500


def test_histogram_is_cumulative() -> None:
    stats = DecisionStats()
    for seconds in (0.0, 0.005, 0.006, 1e9):
        stats.add("keep", seconds)
    rows = dict(stats.seconds.rows())
    assert len(rows) == len(DECISION_BUCKETS) + 1
    assert (rows["0.005"], rows["0.01"], rows["30.0"], rows["+Inf"]) == (2, 3, 3, 4)
    assert stats.outcomes["keep"] == 4
    assert stats.seconds.sum == pytest.approx(1e9 + 0.011)


def test_prediction_errors_have_no_sign_and_few_compressors() -> None:
    stats = PredictionStats()
    for ratio in (0.5, 1.5, 1.0):
        stats.add("topk", ratio)
    assert dict(stats.errors.rows())["0.01"] == 1
    assert dict(stats.errors.rows())["+Inf"] == 3
    assert stats.errors.sum == pytest.approx(1.0)
    assert stats.by_compressor() == {"topk": 0.5}
    for _ in range(RECENT_ERRORS):
        stats.add("topk", 1.1)
    assert stats.by_compressor()["topk"] == pytest.approx(0.1)
    for i in range(COMPRESSORS):
        stats.add(f"plug-in {i}", 1.0)
    assert len(stats.by_compressor()) == COMPRESSORS
    assert "topk" not in stats.by_compressor()


def test_an_error_of_the_history_counts_once() -> None:
    stats = PredictionStats()
    first, second = (StepError("topk 1%", "topk", ratio, False, 9) for ratio in (1.1, 1.3))
    for before, after in (((), (first,)), ((first,), (first,)), ((first,), (first, second))):
        stats.take(before, after)
    stats.take((first, second), ())  # the job started again
    assert dict(stats.errors.rows())["+Inf"] == 2
    assert stats.errors.sum == pytest.approx(0.4)

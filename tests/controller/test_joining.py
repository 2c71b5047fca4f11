from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.controller.joining import (
    KINDS,
    MAX_AGE_SECONDS,
    PENDING,
    PER_KIND,
    PLACES,
    OperationJoiner,
)
from gradpilot.protos.messages import WireSample


def sample(seconds: float, step: int = 1, bucket: int = 0, **fields: object) -> WireSample:
    values = {"round": 0, "collective": "all_reduce", "bytes": 1000, "skip": 0, **fields}
    return WireSample(step=step, bucket=bucket, seconds=seconds, **values)  # type: ignore[arg-type]


@given(st.permutations(range(4)), st.lists(st.floats(1e-6, 10), min_size=4, max_size=4))
@settings(deadline=None, max_examples=50)
def test_transfer_is_the_minimum_in_whatever_order_ranks_report(
    order: list[int], seconds: list[float]
) -> None:
    joiner = OperationJoiner()
    for number, rank in enumerate(order):
        assert joiner.recent(1.0) == ()
        joiner.add(rank, [sample(seconds[rank])], 1.0 + number, 4)
    (operation,) = joiner.recent(6.0)
    assert operation.transfer_seconds == min(seconds)
    assert operation.straggle_seconds == pytest.approx(statistics.median(seconds) - min(seconds))
    assert operation.age_seconds == 2.0
    assert operation.complete


def test_only_the_same_operation_is_joined() -> None:
    joiner = OperationJoiner()
    joiner.add(0, [sample(0.1, step=1), sample(0.2, step=2), sample(0.3, bucket=-1)], 0.0, 2)
    joiner.add(1, [sample(0.05, step=2), sample(0.3, step=3), sample(0.2, bucket=-1)], 0.0, 2)
    assert sorted(o.transfer_seconds for o in joiner.recent(0.0)) == [0.05, 0.2]


def test_ranks_that_disagree_about_an_operation_are_not_joined() -> None:
    joiner = OperationJoiner()
    joiner.add(0, [sample(0.1)], 0.0, 2)
    joiner.add(1, [sample(0.1, collective="broadcast")], 0.0, 2)
    joiner.add(2, [sample(0.1)], 0.0, 2)
    assert joiner.recent(0.0) == ()


def test_after_the_window_half_of_the_ranks_are_enough_and_late_ones_come_too_late() -> None:
    joiner = OperationJoiner()
    for rank in (0, 1):
        joiner.add(rank, [sample(0.1 + rank)], 0.0, 4)
    joiner.add(0, [sample(0.7, step=2)], 0.0, 4)
    joiner.close(5.0, 6.0, 4)
    assert joiner.recent(5.0) == ()
    joiner.close(6.0, 6.0, 4)
    (operation,) = joiner.recent(6.0)
    assert operation.transfer_seconds == 0.1
    assert not operation.complete
    joiner.add(2, [sample(0.01), sample(0.01, step=2)], 7.0, 1)
    assert len(joiner.recent(7.0)) == 1


def test_a_frequent_kind_does_not_push_out_a_rare_one() -> None:
    joiner = OperationJoiner()
    joiner.add(0, [sample(0.5, bucket=-1, bytes=4096)], 0.0, 1)
    for step in range(10 * PER_KIND):
        joiner.add(0, [sample(0.1, step=step)], 1.0, 1)
    recent = joiner.recent(1.0)
    assert len(recent) == PER_KIND + 1
    assert recent[0].bytes == 4096
    assert [o.step for o in recent[1:]] == list(range(9 * PER_KIND, 10 * PER_KIND))


def test_waiting_is_added_up_over_the_collectives_of_a_step() -> None:
    joiner = OperationJoiner()
    # Ranks are late in turn: over a window their medians are equal, per operation they are not.
    for step in range(4):
        for bucket, wait in ((0, 0.02), (1, 0.06), (-1, 1.0)):
            for rank in range(4):
                late = rank == step
                seconds = 0.1 if late else 0.1 + wait
                joiner.add(rank, [sample(seconds, step=step, bucket=bucket)], 1.0, 4)
    assert joiner.straggle(0) == pytest.approx(0.08)
    assert joiner.straggle(3) == pytest.approx(0.08)
    assert joiner.straggle(4) == 0.0
    joiner.clear()
    assert joiner.straggle(0) == 0.0


def test_memory_is_bounded_and_old_operations_are_dropped() -> None:
    joiner = OperationJoiner()
    for step in range(3 * PENDING):
        joiner.add(0, [sample(0.1, step=step)], float(step), 2)
    assert len(joiner._pending) <= PENDING
    assert len(joiner._done) <= 2 * PENDING
    for size in range(3 * KINDS):
        joiner.add(0, [sample(0.1, step=-size - 1, bytes=size)], 1e6, 1)
    assert len(joiner._joined) <= KINDS
    for bucket in range(PLACES + 10):
        joiner.add(0, [sample(0.1, bucket=bucket, step=10**7)], 1e6, 1)
    assert len(joiner._waits) <= PLACES
    assert joiner.recent(1e6)
    assert joiner.recent(1e6 + 2 * MAX_AGE_SECONDS) == ()
    joiner.clear()
    assert joiner.recent(1e6) == ()

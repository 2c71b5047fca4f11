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


def test_the_rank_that_all_wait_for_is_known_with_its_delay() -> None:
    joiner = OperationJoiner()
    for step in range(40):
        for rank, late in enumerate((0.0, 0.02, 0.0, 0.005)):
            joiner.add(rank, [sample(0.1 - late, step), sample(0.1, step, -1)], float(step), 4)
        if step == 6:
            assert joiner.slowest() == (-1, 0.0)  # too early to tell
    rank, seconds = joiner.slowest()
    assert rank == 1
    assert seconds == pytest.approx(0.02)
    for step in range(40, 300):  # another one from now on
        for rank, late in enumerate((0.0, 0.0, 0.01, 0.0)):
            joiner.add(rank, [sample(0.1 - late, step)], float(step), 4)
    rank, seconds = joiner.slowest()
    assert rank == 2
    assert seconds == pytest.approx(0.01, rel=1e-3)
    joiner.clear()
    assert joiner.slowest() == (-1, 0.0)


def test_nobody_is_slowest_while_all_come_together_or_some_are_missing() -> None:
    joiner = OperationJoiner()
    for step in range(20):
        for rank in range(4):
            joiner.add(rank, [sample(0.1, step)], float(step), 4)
        for rank in range(2):
            joiner.add(rank, [sample(0.1 + rank, step, 1)], float(step), 4)
    joiner.close(1000.0, 1.0, 4)
    assert joiner.slowest() == (-1, 0.0)


def test_an_overlap_is_the_least_of_all_ranks() -> None:
    """Who comes last waited for nobody: what it saw beside the collective before is no waiting."""
    joiner = OperationJoiner()
    joiner.add(0, [sample(0.3, overlapped_seconds=0.25)], 0.0, 2)
    joiner.add(1, [sample(0.2, overlapped_seconds=0.05)], 0.0, 2)
    (operation,) = joiner.recent(0.0)
    assert (operation.transfer_seconds, operation.overlapped_seconds) == (0.2, 0.05)

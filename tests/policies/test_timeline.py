from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradpilot.policies.timeline import step_seconds, straggle_seconds, wire_end

Lists = list[list[int]]


def end(ready: list[int], *parts: Lists, at_once: int = 0) -> list[float]:
    one, two, three, four = (np.array(part, dtype=float) for part in parts)
    flags = np.full(len(one), at_once > 0)
    return list(
        wire_end(np.array(ready, dtype=float), one, two, three, four, flags, max(at_once, 1))
    )


def test_sequence_by_hand() -> None:
    # Second bucket waits for the first one's decompress, third for its own readiness.
    got = end([0, 1, 10], [[1, 1, 1]], [[1, 1, 1]], [[2, 2, 2]], [[1, 1, 1]])
    assert got == [15]


def test_pipeline_overlaps_latency() -> None:
    parts = ([[0, 0, 0]], [[5, 5, 5]], [[1, 1, 1]], [[0, 0, 0]])
    assert end([0, 0, 0], *parts) == [18]
    assert end([0, 0, 0], *parts, at_once=3) == [8]


def test_only_so_many_buckets_overlap() -> None:
    parts = ([[0, 0, 0]], [[5, 5, 5]], [[1, 1, 1]], [[0, 0, 0]])
    assert end([0, 0, 0], *parts, at_once=2) == [12]  # the third begins at 6, as the first ends
    assert end([0, 0, 0], *parts, at_once=1) == [18]


def test_compressing_overlaps_with_the_wire_even_where_collectives_do_not() -> None:
    parts = ([[4, 4]], [[5, 5]], [[1, 1]], [[2, 2]])
    assert end([0, 0], *parts) == [24]
    assert end([0, 0], *parts, at_once=1) == [18]  # 4 + 6 + 6, then the last decompress


def test_only_what_sticks_out_counts() -> None:
    ready = np.array([0.0, 4.0])
    assert step_seconds(10, ready, np.array([3.0, 4.0, 6.5])) == pytest.approx([10, 10, 12.5])


@pytest.mark.parametrize(
    ("waited", "measured", "predicted", "expected"),
    [
        (0.02, 0.15, 0.11, 0.02),  # the rest of the gap is no waiting
        (0.02, 0.12, 0.11, 0.01),  # part of it is in the slowest rank's compute time
        (0.02, 0.10, 0.11, 0.0),
        (0.02, 0.0, 0.11, 0.02),  # no step was measured
        (0.02, 0.15, math.nan, 0.02),
        (math.nan, 0.15, 0.11, 0.0),
        (-1.0, 0.15, 0.11, 0.0),
    ],
)
def test_waiting_counts_as_far_as_the_step_shows_it(
    waited: float, measured: float, predicted: float, expected: float
) -> None:
    assert straggle_seconds(waited, measured, predicted) == pytest.approx(expected)


@hypothesis_settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.integers(0, 1000))
def test_vectorised_equals_one_by_one(
    buckets: int, candidates: int, at_once: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ready = np.sort(rng.random(buckets))
    parts = [rng.random((candidates, buckets)) for _ in range(4)]
    flags = rng.random(candidates) < 0.5
    whole = wire_end(ready, parts[0], parts[1], parts[2], parts[3], flags, at_once)
    for p in range(candidates):
        c, lat, tra, d = (part[p] for part in parts)
        done = wire = last = 0.0
        ends = [0.0] * at_once
        for b in range(buckets):
            done = max(done, ready[b]) + c[b] + lat[b] + tra[b] + d[b]
            wire = max(wire, ready[b] + c[b], ends[b]) + tra[b]
            ends.append(max(ends[-1], wire + lat[b]))
            last = max(last, ends[-1] + d[b])
        assert whole[p] == pytest.approx(last if flags[p] else done)
        assert last <= done + 1e-12

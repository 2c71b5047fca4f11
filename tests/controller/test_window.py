from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gradpilot.controller.window import (
    COMPUTE_RECENT,
    ComputeTable,
    bucket_states,
    measured,
    merge_buckets,
)
from gradpilot.protos.messages import BF16, ComputeSample
from tests.controller.fakes import Link, layout, plan, report

OF = layout(2)


def windows(**fields: object) -> list[list[object]]:
    return [[report(OF, rank, **fields)] for rank in range(4)]  # type: ignore[arg-type]


def test_the_slowest_governs_compute_and_the_fastest_shows_transfer() -> None:
    link = Link(straggle=0.04)
    ranks = [
        report(OF, r, link=link, compute_seconds=0.1 + r, exposed_seconds=0.2 * r, loss=float(r))
        for r in range(4)
    ]
    got = measured(OF, [[r] for r in ranks], [r.buckets for r in ranks])
    assert got is not None
    assert got.compute_seconds == 3.1
    assert got.exposed_seconds == pytest.approx(0.3)
    fastest = link.seconds("all_reduce", 4 << 20, 4, 3)
    assert got.synchronisation_seconds == pytest.approx(2 * fastest)
    assert got.straggle_seconds == pytest.approx(2 * 0.04 * 1.5 / 4)
    assert got.wire_ratio == 1.0
    assert got.gain == 1.0
    assert got.loss == 1.5


@pytest.mark.parametrize(
    ("losses", "joined"),
    [
        ((1.0, 2.0, math.nan, math.inf), 1.5),
        ((math.inf, math.nan, -math.inf, math.nan), math.inf),
        ((math.nan,) * 4, math.nan),
    ],
)
def test_losses_are_joined_over_the_ranks_that_still_have_one(
    losses: tuple[float, ...], joined: float
) -> None:
    ranks = [
        report(OF, r, loss=loss, lr=0.1 * r if r else math.nan) for r, loss in enumerate(losses)
    ]
    got = measured(OF, [[r] for r in ranks], [r.buckets for r in ranks])
    assert got is not None
    assert got.loss == pytest.approx(joined, nan_ok=True)
    assert got.lr == pytest.approx(0.3)


def test_several_windows_count_by_their_median() -> None:
    recent = [report(OF, sequence=i, step_seconds=s) for i, s in enumerate((0.1, 9.0, 0.2), 1)]
    got = measured(OF, [recent], [recent[-1].buckets])
    assert got is not None
    assert got.step_seconds == 0.2


def test_nothing_is_known_before_the_first_window() -> None:
    assert measured(OF, [], []) is None
    assert [s.gain for s in bucket_states(OF, [])] == [-1.0, -1.0]


def test_ranks_that_did_not_sample_do_not_count() -> None:
    one, other = report(OF).buckets, report(OF).buckets
    one = tuple(replace(b, gain=0.5, gradient_sq=4.0) for b in one)
    other = tuple(replace(b, gain=-1.0, gradient_sq=-1.0, energy=()) for b in other)
    state = bucket_states(OF, [one, other])[0]
    assert (state.gain, state.gradient_sq) == (0.5, 4.0)
    assert state.energy == one[0].energy


def test_total_gain_is_weighted_by_energy() -> None:
    base = report(OF)
    buckets = (
        replace(base.buckets[0], gain=0.2, gradient_sq=3.0),
        replace(base.buckets[1], gain=0.6, gradient_sq=1.0),
    )
    got = measured(OF, [[base]], [buckets])
    assert got is not None
    assert got.gain == pytest.approx(0.3)
    assert math.isnan(got.loss)


def test_what_a_window_did_not_sample_is_taken_from_the_one_before() -> None:
    old = report(OF).buckets
    new = tuple(replace(b, gain=-1.0, residual_sq=-1.0, energy=(), gradient_sq=-1.0) for b in old)
    same = merge_buckets(old, new, same_plan=True)
    assert same == old
    switched = merge_buckets(old, new, same_plan=False)
    assert switched[0].energy == old[0].energy  # belongs to the gradient
    assert switched[0].gain == -1.0  # belongs to the option
    assert switched[0].residual_sq == -1.0
    assert merge_buckets((), new, same_plan=True) == new


def test_calibration_takes_the_slowest_rank_and_measurements_follow_it() -> None:
    table = ComputeTable()
    slow = ComputeSample("bf16", (), 1.0, 1 << 20, 3.0, 1.0)
    fast = replace(slow, compress_seconds=1.0, decompress_seconds=2.0)
    table.calibrate([[slow], [fast]])
    assert table.samples() == (replace(slow, decompress_seconds=2.0),)
    under = plan(OF, option=BF16)
    for number in range(3 * COMPUTE_RECENT):
        ranks = [
            tuple(
                replace(b, compress_seconds=number + r, decompress_seconds=0.5)
                for b in report(OF, r).buckets
            )
            for r in range(2)
        ]
        table.refine(OF, under, ranks)
    samples = table.samples()
    assert len(samples) == 1 + COMPUTE_RECENT
    assert samples[-1] == ComputeSample("bf16", (), 1.0, 1 << 20, 12.0, 0.5)
    table.calibrate([[fast]])
    assert table.samples()[0] == fast

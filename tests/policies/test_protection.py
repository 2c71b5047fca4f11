from __future__ import annotations

from dataclasses import replace

import pytest

from gradpilot.policies.base import BucketState, Inputs
from gradpilot.policies.history import History
from gradpilot.policies.importance import Importance
from gradpilot.policies.problem import Space
from gradpilot.policies.protection import bare_sq, explain, look, refine, snr, warm_up
from gradpilot.protos.messages import BF16, DENSE, LinkEstimate, Option
from gradpilot.warm_up import STABLE_LOOKS
from tests.policies import scenario

SKIPS = Option(collective="ring", skip=2)
LINK = LinkEstimate(1e-3, 8e-9)
LOUD, QUIET = (0, 0, 100), (100, 100, 0)


def inputs(**settings: object) -> Inputs:
    """Two buckets on four ranks, of which the first holds all large elements."""
    made = scenario.inputs(ranks=4, sizes=(4000, 8000))
    buckets = tuple(
        replace(state, magnitudes=rows, gradient_sq=4.0, mean_sq=2.0)
        for state, rows in zip(made.buckets, (LOUD, QUIET), strict=True)
    )
    chosen = replace(made.settings, **settings)  # type: ignore[arg-type]
    return replace(made, buckets=buckets, settings=chosen)


def test_a_protected_bucket_does_not_skip_and_the_others_do() -> None:
    given = inputs()
    importance = look(given)
    assert importance.protected == (given.layout.buckets[0].fingerprint,)
    assert refine(given, (SKIPS, SKIPS), importance, -1.0) == (replace(SKIPS, skip=0), SKIPS)
    assert "1 of 2 buckets" in explain(given, (SKIPS,), importance)[0]


def test_off_protects_nothing_and_says_nothing() -> None:
    given = inputs(selective="off")
    importance = look(given)
    assert importance == Importance()
    assert refine(given, (SKIPS, SKIPS), importance, -1.0) == (SKIPS, SKIPS)
    assert explain(given, (SKIPS,), importance) == []


def test_once_keeps_the_first_set() -> None:
    given = inputs(selective="once")
    first = look(given)
    swapped = tuple(
        replace(state, magnitudes=rows)
        for state, rows in zip(given.buckets, (QUIET, LOUD), strict=True)
    )
    history = replace(given.history, importance=first)
    later = look(replace(given, buckets=swapped, history=history))
    assert later.protected == first.protected
    assert later.measurements == 2


def test_without_a_sample_of_every_bucket_nothing_is_measured() -> None:
    given = inputs()
    known = Importance(measurements=3)
    partial = (given.buckets[0], replace(given.buckets[1], magnitudes=()))
    history = replace(given.history, importance=known)
    assert look(replace(given, buckets=partial, history=history)) is known


def test_plans_that_do_not_skip_are_left_alone() -> None:
    given = inputs(skip_divisor="shrink")
    for options in ((DENSE, BF16), (Option("topk", 0.01, "allgather"), DENSE)):
        assert refine(given, options, look(given), 0.5) == options


@pytest.mark.parametrize(("divisor", "shrink"), [("skip", 1.0), ("drop", 1.0), ("shrink", 0.5)])
def test_the_divisor_is_the_operators(divisor: str, shrink: float) -> None:
    given = inputs(selective="off", skip_divisor=divisor)
    # 4 ranks of which 2 are heard, at a ratio of 1/2: (1/2) / (1/2 + 1/2).
    (option, _) = refine(given, (SKIPS, SKIPS), Importance(), 0.5)
    assert (option.divisor, option.shrink) == (divisor, shrink)


def test_noise_is_told_while_everything_is_sent() -> None:
    given = inputs()
    # s = (4 - 2) 4/3 per bucket, ||mu||^2 = 2 - s/4.
    assert snr(given, (DENSE, BF16)) == pytest.approx((2 - 2 / 3) / (8 / 3))
    history = replace(given.history, snr=7.0)
    later = replace(given, history=history)
    assert snr(later, (SKIPS, SKIPS)) == 7.0
    assert snr(later, ()) == 7.0


def test_nothing_is_offered_that_skips_before_the_run_is_warm() -> None:
    given = inputs(selective="off")
    given = replace(given, history=History())
    ratio = snr(given, (DENSE, DENSE))
    for look_number in range(STABLE_LOOKS + 1):
        assert not given.history.warmth.warm, look_number
        assert "no steps are skipped" in explain(given, (DENSE,), Importance())[0]
        assert not any(head.skip for head in Space(given, LINK).heads)
        history = replace(given.history, warmth=warm_up(given, ratio))
        given = replace(given, history=history)
    assert given.history.warmth.warm
    assert any(head.skip for head in Space(given, LINK).heads)
    assert explain(given, (DENSE,), Importance()) == []


@pytest.mark.parametrize(
    ("gradient", "residual", "bare"), [(5.0, 4.0, 1.0), (5.0, -1.0, 5.0), (5.0, 9.0, 5.0)]
)
def test_the_residual_is_taken_out_of_the_gradient(
    gradient: float, residual: float, bare: float
) -> None:
    assert bare_sq(BucketState(gradient_sq=gradient, residual_sq=residual)) == bare


def test_a_residual_that_builds_up_is_no_change_of_the_gradient() -> None:
    given = inputs()
    warmth = given.history.warmth
    for residual in (-1.0, 4.0, 20.0, 36.0, 40.0):
        buckets = tuple(
            replace(s, gradient_sq=4.0 + max(residual, 0.0), residual_sq=residual)
            for s in given.buckets
        )
        history = replace(given.history, warmth=warmth)
        warmth = warm_up(replace(given, buckets=buckets, history=history), -1.0)
    assert warmth.stable == 4

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gradpilot.policies.base import BucketState
from gradpilot.policies.credibility import believe, values
from gradpilot.policies.watches import Look
from gradpilot.protos.messages import LinkEstimate
from tests.policies import scenario

GOOD = (BucketState(energy=scenario.ENERGY),) * 2
SEEN = (0.05, 0.1, 0.03)
BEFORE = Look(believed=SEEN)


def test_values_are_those_that_no_plan_changes() -> None:
    inputs = scenario.inputs(backend="model")
    fixed, wire, ready = values(inputs, LinkEstimate(1e-3, 8e-9), 0.02)
    assert fixed == pytest.approx(0.07)
    # Ring over 8 ranks: 14 alpha for each of 3 buckets, 7/4 of 10 MB.
    assert wire == pytest.approx(3 * 14e-3 + 1.75 * 4 * 2_500_000 * 8e-9)
    assert ready == 0.03


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        ((0.09, 0.1, 0.03), ""),
        ((0.11, 0.1, 0.03), "compute time went from 50 to 110 ms"),
        ((0.01, 0.1, 0.03), "compute time"),
        ((0.05, 0.29, 0.03), ""),
        ((0.05, 0.31, 0.03), "wire time"),
        ((0.05, 0.03, 0.03), "wire time"),
        ((0.05, 0.1, 0.1), "become ready"),
        ((0.05, 0.1, 0.016), ""),  # too little to matter
    ],
)
def test_a_jump_must_be_seen_twice(seen: tuple[float, ...], word: str) -> None:
    first = believe(BEFORE, seen, GOOD)
    assert word in first.doubt
    assert bool(first.doubt) == bool(word)
    second = believe(replace(BEFORE, believed=first.believed, doubted=first.doubted), seen, GOOD)
    assert (second.believed, second.doubted, second.doubt) == (seen, (), "")


def test_two_jumps_that_differ_are_both_doubted() -> None:
    first = believe(BEFORE, (0.5, 0.1, 0.03), GOOD)
    second = believe(Look(believed=SEEN, doubted=first.doubted), (5.0, 0.1, 0.03), GOOD)
    assert second.doubt
    back = believe(Look(believed=SEEN, doubted=second.doubted), SEEN, GOOD)
    assert (back.doubt, back.doubted) == ("", ())


def test_the_first_look_is_believed() -> None:
    assert believe(Look(), SEEN, GOOD) == (SEEN, (), "")


@pytest.mark.parametrize(
    "state",
    [
        BucketState(ready_seconds=math.nan),
        BucketState(ready_seconds=-1.0),
        BucketState(gain=math.inf),
        BucketState(gradient_sq=math.nan),
        BucketState(residual_sq=math.inf),
        BucketState(energy=(math.nan,) * 13),
        BucketState(energy=(-0.1,) * 13),
    ],
)
def test_impossible_numbers_are_never_believed(state: BucketState) -> None:
    for _ in range(3):
        found = believe(BEFORE, SEEN, (*GOOD, state))
        assert "impossible numbers" in found.doubt
        assert found.believed == SEEN


def test_what_is_unknown_is_not_impossible_and_no_gradient_is_no_news() -> None:
    assert believe(BEFORE, SEEN, (BucketState(),)).doubt == ""
    assert "no gradient" in believe(BEFORE, SEEN, (BucketState(energy=(0.0,) * 13),)).doubt
    assert believe(BEFORE, SEEN, ()).doubt == ""

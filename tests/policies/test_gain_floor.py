"""The floor of gain as families count it: some go on well at gains at which others do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradpilot.policies.base import POLICIES, BucketState, Inputs, Outcome
from gradpilot.policies.choice import allowed
from gradpilot.policies.learning import next_history
from gradpilot.policies.link import fit_link
from gradpilot.policies.problem import Space
from gradpilot.protos.messages import (
    BucketRounds,
    ComputeSample,
    Family,
    LadderPoint,
    LinkEstimate,
    Option,
    Setting,
    WireRound,
)
from tests.policies import scenario

RANK = (Setting("rank", "4"),)
LOW_RANK = Option("powersgd", settings=RANK)
SIZES = (1_000_000, 1_000_000, 500_000)


def inputs(floor_factor: float, gain: float = 0.16, **fields: object) -> Inputs:
    """A slow link, and a family that sends next to nothing and keeps ``gain``."""
    rounds = tuple(BucketRounds((WireRound("all_reduce", n // 50),)) for n in SIZES)
    family = Family(
        "powersgd", RANK, ("native",), (LadderPoint(1.0, rounds),),
        gain_factor=gain, efficiency_exponent=0.135, floor_factor=floor_factor,
    )  # fmt: skip
    base = scenario.inputs(mbit=20, sizes=SIZES, **fields)  # type: ignore[arg-type]
    samples = tuple(ComputeSample("powersgd", RANK, 1.0, n, 1e-3, 1e-3) for n in (1 << 14, 1 << 20))
    return replace(base, families=(*base.families, family), compute=(*base.compute, *samples))


def decide(of: Inputs) -> Outcome:
    return POLICIES.get("adaptive")().decide(of)


def link(of: Inputs) -> LinkEstimate:
    found = fit_link(of.operations, of.world_size, of.backend, None)
    assert isinstance(found, LinkEstimate)
    return found


def test_a_family_may_stay_below_the_floor_of_the_others() -> None:
    taken = decide(inputs(0.27))
    assert set(taken.options) == {LOW_RANK}
    assert taken.chosen is not None
    assert taken.chosen.gain == pytest.approx(0.16), "the gain itself is told as it is"
    assert LOW_RANK not in decide(inputs(1.0)).options
    assert LOW_RANK not in decide(inputs(0.27, gain=0.05)).options, "its own floor is 0.08"


def test_credit_is_the_gain_over_the_factor() -> None:
    of = inputs(0.27)
    space = Space(of, link(of))
    found = space.uniform()
    own = [i for i in range(len(space)) if space.option(i) == LOW_RANK]
    rest = np.setdiff1d(np.arange(len(space)), own)
    assert found.credit[own] == pytest.approx(0.16 / 0.27)
    assert np.array_equal(found.credit[rest], found.gain[rest])
    for floor in (0.1, 0.3, 0.59, 0.6):
        fit = allowed(found, scenario.settings(gain_floor=floor))
        assert set(fit[own].tolist()) == {floor <= 0.16 / 0.27}


@pytest.mark.parametrize(("measured", "stays"), [(0.30, True), (0.09, True), (0.05, False)])
def test_in_force_it_is_held_to_its_own_floor(measured: float, stays: bool) -> None:
    of = inputs(0.27, current=LOW_RANK)
    states = tuple(replace(s, gain=measured) for s in of.buckets)
    outcome = decide(replace(of, buckets=states))
    assert (outcome.outcome == "keep") is stays, outcome.reason
    assert ("gain floor" in outcome.reason.split(". ")[0]) is not stays


@pytest.mark.parametrize(("measured", "missed"), [(0.09, -1.0), (0.05, 0.05)])
def test_only_what_fell_below_its_own_floor_is_remembered_as_a_miss(
    measured: float, missed: float
) -> None:
    of = inputs(0.27, current=LOW_RANK)
    of = replace(of, buckets=tuple(BucketState(gain=measured, gradient_sq=1.0) for _ in SIZES))
    space = Space(of, link(of))
    after = next_history(of, space.gains, space.present_options, (), link(of))
    assert [r.missed for r in after.gains if r.compressor == "powersgd"] == [missed]

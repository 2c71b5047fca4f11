from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.policies.base import PolicySettings
from gradpilot.protos.messages import BF16, DENSE, Option
from gradpilot.simulate.driver import Driver
from gradpilot.simulate.engine import Noise, Weather
from gradpilot.simulate.oracle import Clairvoyant
from gradpilot.simulate.traces import MAKERS, Link, Trace, constant, make_trace
from tests.simulate.cases import TOPK, alternate, case, everywhere

FREE = PolicySettings(gain_floor=0.0, ratios=6, interval=20)
FEW = PolicySettings(ratios=6)


@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(["constant", *MAKERS]),
    model=st.sampled_from(["resnet50", "cnn"]),
    ranks=st.sampled_from([2, 8, 64]),
    sequential=st.booleans(),
)
@settings(deadline=None, max_examples=12)
def test_nobody_is_faster_than_the_oracle(
    seed: int, name: str, model: str, ranks: int, sequential: bool
) -> None:
    trace = make_trace(name, seed, 60.0)
    noise = Noise() if seed % 2 else Noise(0, 0, 0, 0, 0, 0)
    of = case(
        trace, model=model, ranks=ranks, steps=150, sequential=sequential, seed=seed,
        noise=noise, settings=FREE,
    )  # fmt: skip
    weather = Weather(of.world, noise, seed)
    fixed = {
        option: Driver(of, weather).fixed(everywhere(of, option))
        for option in (DENSE, BF16, TOPK, Option("none", collective="ring"))
    }
    results = [*fixed.values(), Driver(of, weather).run(alternate)]
    clairvoyant = Clairvoyant(of, weather, tuple(fixed))
    bound = clairvoyant.oracle()
    _, best = clairvoyant.best_fixed()
    slowest = max(r.seconds / r.steps for r in results)
    # A step is not divided where the link changes; noise goes by step, not by time.
    slack = 1.001 if len(trace.links) == 1 and noise.wire == 0 else 1.05
    for result in (*results, best):
        assert bound.seconds <= slack * result.seconds + 3 * slowest * (slack > 1.01)


def test_on_a_constant_network_it_is_the_best_fixed_plan() -> None:
    of = case(constant(1.0, 1.0), steps=200, settings=FEW)
    gradients = of.world.job.gradients
    kind = type(gradients)
    gain, weights = kind.gain, kind.weights

    # If the gradients do not change either, there is nothing that it could know better.
    with (
        mock.patch.object(kind, "gain", lambda g, family, ratios, at: gain(g, family, ratios, 0.0)),
        mock.patch.object(kind, "weights", lambda g, at: weights(g, 0.0)),
    ):
        still = Clairvoyant(of, Weather(of.world, of.noise, of.seed))
        assert still.oracle().seconds == pytest.approx(still.best_fixed()[1].seconds, rel=1e-9)

    clairvoyant = Clairvoyant(of, Weather(of.world, of.noise, of.seed))
    bound = clairvoyant.oracle()
    (option, *_), best = clairvoyant.best_fixed()
    assert bound.seconds <= best.seconds * (1 + 1e-9)
    assert option.family not in (DENSE.family, BF16.family)
    brute = min(
        Driver(of).fixed(everywhere(of, o)).seconds
        for o in clairvoyant.options
        if not o.skip and Driver(of).fixed(everywhere(of, o)).below_floor == 0
    )
    assert best.seconds == pytest.approx(brute, rel=0.01)


def test_the_gain_floor_holds_for_it_too() -> None:
    of = case(constant(0.1, 0.05), steps=50, settings=PolicySettings(gain_floor=1.0, ratios=4))
    clairvoyant = Clairvoyant(of, Weather(of.world, of.noise, of.seed))
    (option, *_), best = clairvoyant.best_fixed()
    assert option.ratio == 1
    assert not option.skip
    assert best.below_floor == 0


def test_it_changes_with_the_network() -> None:
    fast, slow = Link.of(0.01, 25), Link.of(0.01, 0.2)
    low = PolicySettings(gain_floor=0.1, ratios=6)  # else 8 bits are as good in both phases
    of = case(Trace("two", (0.0, 15.0), (fast, slow), 30.0), steps=300, settings=low)
    clairvoyant = Clairvoyant(of, Weather(of.world, of.noise, of.seed))
    assert clairvoyant.oracle().seconds < 0.97 * clairvoyant.best_fixed()[1].seconds

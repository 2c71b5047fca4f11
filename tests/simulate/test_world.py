from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradpilot.errors import ConfigError
from gradpilot.policies.base import Inputs, Outcome, PolicySettings
from gradpilot.policies.problem import Space
from gradpilot.protos.messages import BF16, DENSE, LinkEstimate, Option, Setting
from gradpilot.simulate.driver import Case, Driver
from gradpilot.simulate.jobs import JOBS, make_job
from gradpilot.simulate.traces import Link
from gradpilot.simulate.world import World
from gradpilot.warm_up import Warmth
from tests.simulate.cases import case

STAR = (Setting("selection", "star"),)
OPTIONS = (
    DENSE,
    BF16,
    Option("none", collective="ring"),
    Option("none", collective="ring", skip=3),
    Option("topk", 0.01, "allgather"),
    Option("topk", 0.02, "allgather"),
    Option("artopk", 0.03, settings=STAR),
    Option("artopk", 0.05, "ring", settings=STAR),
)


def seen_by_a_policy(of: Case) -> Inputs:
    """Return the inputs of the first decision."""
    found: list[Inputs] = []

    def note(inputs: Inputs) -> Outcome:
        found.append(inputs)
        return Outcome("keep", "noted")

    Driver(of).run(note)
    return found[0]


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("model", JOBS)
def test_without_noise_policies_predict_exactly_what_happens(model: str, sequential: bool) -> None:
    of = case(model=model, sequential=sequential, steps=200 if model != "cnn" else 1500)
    link = of.trace.at(0)
    inputs = seen_by_a_policy(of)
    assert inputs.compute_seconds == pytest.approx(of.world.job.compute_seconds, rel=1e-9)
    assert inputs.straggle_seconds == pytest.approx(0, abs=1e-9)
    warm = replace(inputs.history, warmth=Warmth(warm=True))  # else nothing may be skipped
    space = Space(replace(inputs, history=warm), LinkEstimate(link.alpha, link.beta))
    costs = of.world.costs(OPTIONS)
    for option, seconds in zip(OPTIONS, of.world.seconds(costs, link), strict=True):
        number = space.add(option)
        assert number is not None
        rows = np.full((1, len(inputs.layout.buckets)), number)
        predicted = space.evaluate(rows).step_seconds[0]
        # Seconds of compressors pass through the reports, where a median of equal numbers is taken.
        assert seconds == pytest.approx(predicted, rel=1e-9)


def test_rounds_add_up_to_the_costs() -> None:
    world, link = World(make_job("resnet50"), 8), Link.of(2.0, 1.0)
    costs = world.costs(OPTIONS)
    for k, option in enumerate(OPTIONS):
        seconds = np.zeros(5)
        for one in world.rounds((option,) * 5):
            seconds[one.bucket] += one.alphas * link.alpha + one.pushed * link.beta
        expected = costs.alphas[k] * link.alpha + costs.pushed[k] * link.beta
        assert seconds == pytest.approx(expected, rel=1e-6)  # whole bytes


def test_worth_is_one_only_for_whole_gradients() -> None:
    world = World(make_job("resnet50"), 8)
    gain, worth = world.worth(OPTIONS, 0.5)
    assert (gain[:3] == 1).all()
    assert (worth[:3] == 1).all()
    assert gain[3] == pytest.approx(5 / 8)
    assert (gain[3:] < 1).all()
    assert (worth[3:] < 1).all()


def test_skips_are_thinned_where_there_are_many() -> None:
    settings = PolicySettings()
    few, many = (World(make_job("resnet50"), n).options(settings) for n in (8, 1024))
    assert {o.skip for o in few} == set(range(8))
    skips = {o.skip for o in many}
    assert {0, 1023} <= skips
    assert 8 < len(skips) < 20
    assert len(many) < 3000


def test_what_agents_cannot_do_is_refused() -> None:
    world = World(make_job("cnn"), 8)
    for option in (Option("powersgd"), Option("topk", 0.1, "ring")):
        with pytest.raises(ConfigError, match="cannot do"):
            world.family(option)
    for ranks in (1, 5000):
        with pytest.raises(ConfigError, match=r"2 \.\. 4096"):
            World(make_job("cnn"), ranks)

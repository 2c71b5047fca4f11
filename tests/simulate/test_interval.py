"""The decision step follows the step time, in the simulator as in the controller."""

from __future__ import annotations

import math

import pytest

from gradpilot.controller.plans import decision_interval
from gradpilot.policies.base import PolicySettings
from gradpilot.protos.messages import EARLY_INTERVAL, EARLY_STEPS, START_INTERVAL, Plan
from gradpilot.simulate.driver import Case, Driver
from gradpilot.simulate.engine import QUIET
from gradpilot.simulate.jobs import make_job
from gradpilot.simulate.traces import constant
from gradpilot.simulate.world import World


@pytest.mark.parametrize(
    ("seconds", "interval"),
    [
        (0.001, 50), (0.1, 50), (0.2, 25), (3.0, 2), (5.0, 1), (1e6, 1),
        (0.0, 50), (-1.0, 50), (math.nan, 50), (math.inf, 50),
    ],
)  # fmt: skip
def test_slow_steps_have_fewer_steps_between_decision_steps(seconds: float, interval: int) -> None:
    assert decision_interval(PolicySettings(), seconds) == interval
    assert decision_interval(PolicySettings(interval=1), seconds) == 1


def test_the_first_plan_of_a_slow_job_comes_soon() -> None:
    """A dense step takes 5.3 s: fifty of them would be more than four minutes."""
    world = World(make_job("transformer"), 8)
    case = Case(world, constant(2, 1.25), steps=60, noise=QUIET)
    result = Driver(case).run("adaptive")
    first = result.switches[0]
    assert first.step <= 2 * EARLY_INTERVAL
    assert first.seconds < 60
    later = [switch.seconds - switch.decided for switch in result.switches[1:]]
    assert all(waited < 10 for waited in later)


def test_decision_steps_are_dense_at_first() -> None:
    """Every rank computes them for itself, and the controller waits by them."""
    start, later = Plan(0, 0, "", interval=START_INTERVAL), Plan(1, 1, "", interval=50)
    found = [step for step in range(1, 121) if not start.steps_to_decision(step)]
    assert found == [*range(EARLY_INTERVAL, EARLY_STEPS + 1, EARLY_INTERVAL), 60, 80, 100, 120]
    assert [step for step in range(1, 121) if not later.steps_to_decision(step)] == [50, 100]
    for plan in (start, later):
        for step in range(1, 121):
            assert not plan.steps_to_decision(step + plan.steps_to_decision(step))

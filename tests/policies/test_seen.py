from __future__ import annotations

from dataclasses import replace

import pytest

from gradpilot.policies.base import Outcome
from gradpilot.policies.seen import seen
from gradpilot.policies.watches import ResidualTrend
from gradpilot.protos.messages import BF16
from tests.policies import scenario


def test_it_tells_what_was_measured() -> None:
    inputs = scenario.inputs(
        current=BF16, step_seconds=0.3, straggle_seconds=0.01, slowest_rank=3, slowest_seconds=0.02
    )
    states = tuple(
        replace(s, gain=g, gradient_sq=w)
        for s, g, w in zip(inputs.buckets, (0.5, 1.0, 1.0), (2.0, 1.0, 1.0), strict=True)
    )
    history = replace(inputs.history, snr=0.7, residuals=ResidualTrend(last=4.0))
    found = seen(replace(inputs, buckets=states), Outcome("keep", "", history=history))
    assert (found.ranks, found.steps) == (8, 1000)
    assert (found.step_seconds, found.compute_seconds) == (0.3, 0.05)
    assert (found.straggle_seconds, found.slowest_rank, found.slowest_seconds) == (0.01, 3, 0.02)
    assert found.gain == pytest.approx(0.75)  # weighted by the gradients
    assert (found.snr, found.residual_ratio) == (0.7, 4.0)


def test_what_the_policy_did_not_learn_comes_from_before() -> None:
    inputs = scenario.inputs()
    inputs = replace(inputs, history=replace(inputs.history, snr=0.2))
    found = seen(inputs, Outcome("keep", ""))
    assert (found.snr, found.residual_ratio, found.gain, found.slowest_rank) == (0.2, -1, -1, -1)

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.probing import PROBE_BYTES, link_or_answer, link_text, probe_sizes
from gradpilot.protos.messages import LinkEstimate
from tests.policies import scenario


def test_a_link_that_can_be_told_is_returned() -> None:
    link = link_or_answer(scenario.inputs(mbit=100, alpha=2e-3))
    assert isinstance(link, LinkEstimate)
    assert link.alpha_seconds == pytest.approx(2e-3)
    assert link.beta_seconds_per_byte == pytest.approx(8e-8)
    assert link_text(link) == f"link 2 ms, 0.1 Gbit/s from {link.samples} collectives"


def test_without_operations_the_last_estimate_stays() -> None:
    last = LinkEstimate(1e-3, 1e-9)
    kept = link_or_answer(scenario.inputs(operations=(), link=last))
    assert isinstance(kept, Outcome)
    assert (kept.outcome, kept.link) == ("keep", last)


def test_one_size_asks_for_a_probe() -> None:
    asked = link_or_answer(
        scenario.inputs(operations=scenario.operations(1e-3, 8e-9, 8, sizes=(4096,)))
    )
    assert isinstance(asked, Outcome)
    assert asked.outcome == "probe"
    assert asked.probe_bytes == PROBE_BYTES
    assert "cannot tell latency from bandwidth" in asked.reason


@pytest.mark.parametrize("elements", [1, 100, 10_000, 10_000_000])
def test_probes_are_no_larger_than_the_gradient(elements: int) -> None:
    small, large = probe_sizes(scenario.inputs(sizes=(elements,)))
    assert 4 <= small < large <= max(64, min(4 * elements, PROBE_BYTES[1]))


def test_no_bandwidth_limit() -> None:
    assert "no bandwidth limit seen" in link_text(LinkEstimate(1e-3, 0.0))


def busy(seconds: float, *, alpha: float = 5e-5, noise: float = 0.03) -> Inputs:
    """All-gathers of nearly one size on a link that is all bandwidth."""
    rng = np.random.default_rng(1)
    made = [
        replace(one, transfer_seconds=one.transfer_seconds * math.exp(noise * rng.normal()))
        for one in scenario.operations(
            alpha, 8e-9, 8, sizes=(3_000_000, 4_000_000), repeats=20, collective="all_gather"
        )
    ]
    return scenario.inputs(operations=tuple(made), step_seconds=seconds)


def test_a_latency_too_small_to_matter_needs_no_probe() -> None:
    """A link that changes all the time would otherwise be probed at every decision."""
    link = link_or_answer(busy(60.0))
    assert isinstance(link, LinkEstimate)
    assert not link.separable
    assert link.beta_seconds_per_byte == pytest.approx(8e-9, rel=0.1)
    asked = link_or_answer(busy(0.1))  # there it may be half of a step
    assert isinstance(asked, Outcome)
    assert asked.outcome == "probe"

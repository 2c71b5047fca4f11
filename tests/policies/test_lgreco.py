from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradpilot.policies.base import BucketState, Inputs, Outcome
from gradpilot.policies.host import Host, find_host
from gradpilot.policies.lgreco import PUBLISHED, LGreCo, State, allocation
from gradpilot.policies.published import recall
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import ENERGY_RATIOS
from tests.policies import scenario

SIZES = (1_000_000, 300_000, 2_000_000)


def curve(power: float) -> tuple[float, ...]:
    """Return an energy curve: the smaller the power the more the largest elements hold."""
    return tuple(ratio**power for ratio in ENERGY_RATIOS)


def inputs(
    powers: tuple[float, ...] = (0.1, 0.3, 0.6),
    squares: tuple[float, ...] = (1.0, 5.0, 2.0),
    **fields: object,
) -> Inputs:
    states = tuple(
        BucketState(0.01 * i, -1.0, square, 0.0, curve(power))
        for i, (power, square) in enumerate(zip(powers, squares, strict=True))
    )
    return scenario.inputs(**{"sizes": SIZES, "buckets": states, "mbit": 100, **fields})  # type: ignore[arg-type]


def decide(of: Inputs) -> Outcome:
    return LGreCo().decide(of)


def host_of(of: Inputs) -> Host:
    host = find_host(of, "topk", ("allgather",))
    assert host is not None
    return host


def bytes_and_error(host: Host, ratios: tuple[float, ...]) -> tuple[float, float]:
    each = np.array(ratios)
    at = np.arange(len(each))
    errors = (1 - host.gain(each)) * host.weights
    return float(host.payload(each)[at, at].sum()), float(errors[at, at].sum())


POWERS = st.tuples(*[st.floats(0.02, 0.9)] * 3)
SQUARES = st.tuples(*[st.floats(1e-6, 1e6)] * 3)


@hypothesis_settings(max_examples=25, deadline=None)
@given(POWERS, SQUARES)
def test_within_the_budget_and_never_worse_than_uniform(
    powers: tuple[float, ...], squares: tuple[float, ...]
) -> None:
    made = inputs(powers, squares)
    host = host_of(made)
    found = allocation(made, host)
    size, error = bytes_and_error(host, found.ratios)
    uniform = [bytes_and_error(host, (ratio,) * 3) for ratio in host.grid((PUBLISHED.reference,))]
    budget = bytes_and_error(host, (PUBLISHED.reference,) * 3)[1]
    assert error <= budget * (1 + 1e-9)
    assert size <= min(s for s, e in uniform if e <= budget * (1 + 1e-12)) * (1 + 1e-12)


@hypothesis_settings(max_examples=25, deadline=None)
@given(POWERS, SQUARES)
def test_three_buckets_and_four_ratios_as_by_brute_force(
    powers: tuple[float, ...], squares: tuple[float, ...]
) -> None:
    made = inputs(powers, squares, settings=scenario.settings(ratios=3))
    host = host_of(made)
    ratios = host.grid((PUBLISHED.reference,))
    assert len(ratios) in (3, 4)
    budget = bytes_and_error(host, (PUBLISHED.reference,) * 3)[1]
    fits = [
        size
        for size, error in (
            bytes_and_error(host, choice) for choice in itertools.product(ratios.tolist(), repeat=3)
        )
        if error <= budget * (1 + 1e-12)
    ]
    size, _ = bytes_and_error(host, allocation(made, host).ratios)
    assert size == pytest.approx(min(fits), rel=1e-9)


def test_bytes_go_where_they_remove_most_error() -> None:
    outcome = decide(inputs())
    assert outcome.outcome == "switch"
    ratios = [option.ratio for option in outcome.options]
    assert len(set(ratios)) > 1
    assert {o.compressor for o in outcome.options} == {"topk"}
    # The small bucket with most of the energy is sent best.
    assert ratios[1] == max(ratios)
    assert "instead of" in outcome.reason
    assert "budget" in outcome.reason
    assert outcome.chosen is not None


def test_renewed_after_so_many_steps_only() -> None:
    first = inputs()
    outcome = decide(first)
    assert outcome.history is not None
    other = inputs((0.6, 0.1, 0.3))

    def later(steps: int) -> Inputs:
        return replace(
            other,
            step=first.step + steps,
            current=scenario.plan(first.layout, outcome.options),
            history=from_json(type(outcome.history), to_json(outcome.history)),  # type: ignore[arg-type]
        )

    kept = decide(later(PUBLISHED.renew_steps - 1))
    assert kept.outcome == "keep"
    assert "in force" in kept.reason
    renewed = decide(later(PUBLISHED.renew_steps))
    assert renewed.outcome == "switch"
    assert [o.ratio for o in renewed.options] == pytest.approx(
        allocation(other, host_of(other)).ratios
    )
    # A training that began again at step 0 does not wait for the old one's clock.
    assert decide(later(-900)).outcome == "switch"


def test_another_layout_starts_over() -> None:
    outcome = decide(inputs())
    assert outcome.history is not None
    other = scenario.inputs(sizes=(10_000, 20_000), history=outcome.history)
    assert recall(other, "lgreco", State) is None
    assert len(decide(other).options) == 2


def test_the_wait_between_switches_holds() -> None:
    made = inputs(steps_since_switch=3)
    waiting = replace(made, current=scenario.plan(made.layout, decide(made).options[::-1]))
    outcome = decide(waiting)
    assert outcome.outcome == "keep"
    assert "only 3 of 20 steps" in outcome.reason


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
def test_impossible_measurements_keep_the_plan(wrong: float) -> None:
    made = inputs()
    for state in (
        replace(made.buckets[2], gradient_sq=wrong),
        replace(made.buckets[2], energy=(*scenario.ENERGY[:-1], wrong)),
        replace(made.buckets[2], energy=()),
    ):
        outcome = decide(replace(made, buckets=(*made.buckets[:2], state)))
        assert outcome.outcome == "keep"
        assert "bucket 2" in outcome.reason


def test_without_topk_or_a_timed_link() -> None:
    made = inputs()
    none = tuple(f for f in made.families if f.compressor != "topk")
    assert "no topk" in decide(replace(made, families=none)).reason
    # Bytes and errors need no link; there is just no prediction to show.
    unknown = decide(replace(made, operations=()))
    assert unknown.options == decide(made).options
    assert unknown.chosen is None


def test_gradients_of_zero() -> None:
    assert decide(inputs(squares=(0.0, 0.0, 0.0))).outcome == "switch"

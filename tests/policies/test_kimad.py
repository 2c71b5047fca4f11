from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradpilot.policies.base import BucketState, Inputs, Outcome
from gradpilot.policies.cost import coefficients
from gradpilot.policies.host import Host, find_host
from gradpilot.policies.kimad import PUBLISHED, Kimad, budget_of, dense_seconds
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import DENSE, ENERGY_RATIOS, LinkEstimate, Option
from tests.policies import scenario

PLUS = scenario.settings(per_bucket=True)


def decide(of: Inputs) -> Outcome:
    return Kimad().decide(of)


def host_of(of: Inputs) -> Host:
    host = find_host(of, "topk", ("allgather",))
    assert host is not None
    return host


def sent_bytes(options: tuple[Option, ...], of: Inputs) -> float:
    if set(options) == {DENSE}:
        return 4.0 * of.layout.elements
    payloads = host_of(of).payload(np.array([option.ratio for option in options]))
    return float(np.diag(payloads).sum())


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    st.floats(0.5, 4.5), st.floats(-5, -2), st.sampled_from((2, 4, 8, 64)), st.floats(0.001, 2),
    st.booleans(),
)  # fmt: skip
def test_what_is_sent_fits_in_the_time(
    log_mbit: float, log_alpha: float, ranks: int, compute: float, plus: bool
) -> None:
    settings = scenario.settings(per_bucket=plus)
    made = scenario.inputs(
        mbit=10**log_mbit, alpha=10**log_alpha, ranks=ranks, compute_seconds=compute,
        settings=settings,
    )  # fmt: skip
    outcome = decide(made)
    assert outcome.outcome == "switch"
    link = LinkEstimate(10**log_alpha, 8e-6 / 10**log_mbit)
    slack = (PUBLISHED.stretch - 1) * compute
    if set(outcome.options) == {DENSE}:
        assert dense_seconds(made, link) <= slack * 1.001
        return
    host = host_of(made)
    budget = budget_of(host, host.grid(), link, slack).bytes
    sent = sent_bytes(outcome.options, made)
    if {o.ratio for o in outcome.options} != {host.lowest}:
        assert sent <= budget * 1.001  # the link is a fit to exact times
        a, b = coefficients("all_gather", ranks)
        wire = 3 * a * link.alpha_seconds + b * sent * link.beta_seconds_per_byte
        assert wire <= slack * 1.001


@pytest.mark.parametrize("settings", [scenario.settings(), PLUS])
def test_more_bandwidth_never_sends_less(settings: object) -> None:
    sent = []
    for mbit in (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000):
        made = scenario.inputs(mbit=mbit, alpha=1e-5, compute_seconds=0.5, settings=settings)
        sent.append(sent_bytes(decide(made).options, made))
    assert sent == sorted(sent)
    assert len(set(sent)) >= 5
    assert sent[-1] == 4 * 2_500_000


def test_less_time_beside_compute_sends_less() -> None:
    few, many = (
        decide(scenario.inputs(mbit=200, compute_seconds=seconds)).options[0].ratio
        for seconds in (0.2, 1.0)
    )
    assert few < many


def test_no_time_at_all_is_told() -> None:
    outcome = decide(scenario.inputs(mbit=1, compute_seconds=0.0))
    assert {o.ratio for o in outcome.options} == {0.001}
    assert "is less than" in outcome.reason
    # Latency alone may take all of it.
    outcome = decide(scenario.inputs(mbit=1000, alpha=0.5))
    assert {o.ratio for o in outcome.options} == {0.001}
    assert "of 25 ms beside compute latency takes 2.1e+04 ms" in outcome.reason


def test_kimad_plus_errs_less_within_the_same_bytes() -> None:
    curves = [tuple(ratio**power for ratio in ENERGY_RATIOS) for power in (0.1, 0.3, 0.6)]
    states = tuple(
        BucketState(0.0, -1.0, square, -1.0, energy)
        for square, energy in zip((1.0, 8.0, 3.0), curves, strict=True)
    )
    one, each = (
        scenario.inputs(mbit=100, compute_seconds=0.6, buckets=states, settings=settings)
        for settings in (scenario.settings(), PLUS)
    )
    uniform, plus = decide(one).options, decide(each).options
    assert len(set(uniform)) == 1
    assert len(set(plus)) > 1
    host = host_of(one)

    def error(options: tuple[Option, ...]) -> float:
        gains = np.diag(host.gain(np.array([option.ratio for option in options])))
        return float((1 - gains) @ host.weights)

    assert error(plus) < 0.98 * error(uniform)
    slack = (PUBLISHED.stretch - 1) * 0.6
    budget = budget_of(host, host.grid(), LinkEstimate(1e-3, 8e-8), slack).bytes
    assert sent_bytes(plus, each) <= budget * 1.001


def test_noise_of_the_bandwidth_does_not_change_the_plan() -> None:
    made = scenario.inputs(mbit=100, compute_seconds=0.6)
    first = decide(made)
    again = replace(
        made,
        current=scenario.plan(made.layout, first.options),
        operations=scenario.operations(1e-3, 8.1e-8, 8),
    )
    assert decide(again).outcome == "keep"


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
def test_impossible_measurements_keep_the_plan(wrong: float) -> None:
    made = scenario.inputs(settings=PLUS)
    assert decide(replace(made, compute_seconds=wrong)).outcome == "keep"
    broken = (replace(made.buckets[0], gradient_sq=wrong), *made.buckets[1:])
    assert decide(replace(made, buckets=broken)).outcome == "keep"
    # Without per_bucket no gradient is looked at.
    plain = replace(made, buckets=broken, settings=scenario.settings())
    assert decide(plain).outcome == "switch"


def test_without_topk_or_a_link() -> None:
    made = scenario.inputs(mbit=10)
    none = tuple(f for f in made.families if f.compressor != "topk")
    assert "no topk" in decide(replace(made, families=none)).reason
    assert decide(replace(made, operations=())).outcome == "keep"
    one = scenario.operations(1e-3, 8e-9, 8, sizes=(4096,))
    assert decide(replace(made, operations=one)).outcome == "probe"


def test_pure() -> None:
    made = scenario.inputs(mbit=50)
    assert to_json(decide(made)) == to_json(decide(from_json(Inputs, to_json(made))))

"""Corrupt windows in front of the adaptive policy: whatever a window says, the plan gets no worse.

Inputs are those of a job that decided before, then one window is spoilt: the newest collectives,
the newest sample of every compressor, the state of buckets, times or counters. The outcome must be
to keep the plan, or a switch whose true cost, under the inputs before they were spoilt, is no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.policies.base import POLICIES, BucketState, Inputs, Operation, Outcome
from gradpilot.policies.problem import Space
from gradpilot.protos.messages import BF16, DENSE, ComputeSample, LinkEstimate, Option
from tests.policies import scenario

SICK = {"nan": math.nan, "inf": math.inf, "zero": 0.0, "negative": -1e-3}
SLOW = 100.0
TOPK = Option("topk", 0.03, "allgather")
PLANS = (DENSE, BF16, TOPK, Option("artopk", 0.1, "ring", settings=scenario.STAR))
RATES = (20.0, 100.0, 400.0, 1000.0, 10_000.0)


def decide(inputs: Inputs) -> Outcome:
    return POLICIES.get("adaptive")().decide(inputs)


def cost(inputs: Inputs, options: tuple[Option, ...]) -> float:
    """Return the true cost of a plan: what the models say of the inputs that nothing spoilt."""
    link = LinkEstimate(ALPHA, 8e-6 / rate(inputs))
    space = Space(inputs, link)
    numbers = [space.add(option) for option in options]
    assert None not in numbers
    return float(space.evaluate(np.array([numbers], dtype=np.intp)).cost[0])


ALPHA = 1e-3


def rate(inputs: Inputs) -> float:
    return float(inputs.run)


@lru_cache(maxsize=64)
def healthy(mbit: float, option: Option, ranks: int, waited: float) -> Inputs:
    """Return a warm job that has decided before; three windows have measured every compressor."""
    base = scenario.inputs(mbit=mbit, alpha=ALPHA, ranks=ranks, current=option)
    base = replace(base, run=repr(mbit), compute=scenario.compute_samples() * 3, nonfinite_steps=4)
    gains = Space(base, LinkEstimate(ALPHA, 8e-6 / mbit)).present()
    assert gains is not None
    kept = 1.0 if option in (DENSE, BF16) else 0.9 * float(gains.gain[0])
    base = replace(base, buckets=tuple(replace(b, gain=kept) for b in base.buckets))
    truth = cost(base, (option,) * len(base.layout.buckets))
    worth = Space(base, LinkEstimate(ALPHA, 8e-6 / mbit)).present()
    assert worth is not None
    base = replace(
        base,
        step_seconds=truth * float(worth.efficiency[0]) + waited,
        straggle_seconds=waited,
    )
    for _ in range(6):
        outcome = decide(base)
        assert outcome.history is not None
        base = replace(
            base, step=base.step + 100, link=outcome.link,
            history=replace(outcome.history, trial=None),
        )  # fmt: skip
    return base


# --- what can be wrong with a window -------------------------------------------------------------

Spoil = Callable[[Inputs], Inputs]


def newest(operations: tuple[Operation, ...]) -> tuple[tuple[Operation, ...], list[Operation]]:
    """Return the operations of earlier windows and those of the newest."""
    step = max(o.step for o in operations)
    return tuple(o for o in operations if o.step < step), [o for o in operations if o.step == step]


def sick_operations(value: float) -> Spoil:
    def spoil(inputs: Inputs) -> Inputs:
        old, new = newest(inputs.operations)
        sick = tuple(replace(o, transfer_seconds=value, straggle_seconds=value) for o in new)
        return replace(inputs, operations=old + sick)

    return spoil


def sick_compute(value: float) -> Spoil:
    def spoil(inputs: Inputs) -> Inputs:
        last = inputs.compute[-len(scenario.compute_samples()) :]
        sick = tuple(replace(s, compress_seconds=value, decompress_seconds=value) for s in last)
        return replace(inputs, compute=inputs.compute + sick)

    return spoil


def sick_buckets(name: str, value: float, at: int | None) -> Spoil:
    def one(b: int, state: BucketState) -> BucketState:
        if at not in (None, b):
            return state
        content = (value,) * len(state.energy) if name == "energy" else value
        return replace(state, **{name: content})  # type: ignore[arg-type]

    return lambda inputs: replace(
        inputs, buckets=tuple(one(b, s) for b, s in enumerate(inputs.buckets))
    )


def sick_field(name: str, value: float) -> Spoil:
    return lambda inputs: replace(inputs, **{name: value})  # type: ignore[arg-type]


def missing_rank(inputs: Inputs) -> Inputs:
    """The slowest rank does not report: everybody's collectives hold the waiting for it."""
    old, new = newest(inputs.operations)
    late = tuple(
        replace(o, transfer_seconds=SLOW * o.transfer_seconds, complete=False) for o in new
    )
    step = inputs.step_seconds * SLOW
    return replace(inputs, operations=old + late, step_seconds=step, compute_seconds=0.01)


def slow_rank(inputs: Inputs) -> Inputs:
    """One rank computes and compresses a hundred times slower; the others wait for it."""
    old, new = newest(inputs.operations)
    waited = (SLOW - 1) * inputs.compute_seconds
    late = tuple(replace(o, straggle_seconds=waited / len(new)) for o in new)
    slowed = tuple(
        ComputeSample(
            s.compressor, s.settings, s.ratio, s.elements, SLOW * s.compress_seconds,
            SLOW * s.decompress_seconds,
        )
        for s in scenario.compute_samples()
    )  # fmt: skip
    return replace(
        inputs,
        operations=old + late,
        compute=inputs.compute + slowed,
        compute_seconds=SLOW * inputs.compute_seconds,
        step_seconds=inputs.step_seconds + waited,
        straggle_seconds=waited,
    )


def everything(value: float) -> Spoil:
    def spoil(inputs: Inputs) -> Inputs:
        for part in (
            sick_operations(value),
            sick_compute(value),
            *(sick_buckets(name, value, None) for name in BUCKET_FIELDS),
            *(sick_field(name, value) for name in FIELDS),
        ):
            inputs = part(inputs)
        return inputs

    return spoil


BUCKET_FIELDS = ("ready_seconds", "gain", "gradient_sq", "residual_sq", "energy", "mean_sq")
FIELDS = ("compute_seconds", "step_seconds", "straggle_seconds", "loss", "lr")

sickness = st.sampled_from(sorted(SICK)).map(SICK.__getitem__)
spoils: st.SearchStrategy[Spoil] = st.one_of(
    st.builds(sick_operations, sickness),
    st.builds(sick_compute, sickness | st.just(5.0)),
    st.builds(
        sick_buckets, st.sampled_from(BUCKET_FIELDS), sickness, st.sampled_from((None, 0, 1, 2))
    ),
    st.just(sick_buckets("ready_seconds", 3.0, None)),
    st.just(sick_buckets("gradient_sq", 1e30, 1)),
    st.just(sick_buckets("residual_sq", 1e30, 1)),
    st.builds(sick_field, st.sampled_from(FIELDS), sickness),
    st.builds(sick_field, st.just("nonfinite_steps"), st.sampled_from((-1, 0, 10**9))),
    st.builds(sick_field, st.just("steps_since_switch"), st.sampled_from((-1, 0, 10**9))),
    st.just(missing_rank),
    st.just(slow_rank),
    st.builds(everything, sickness),
)


@settings(max_examples=100, deadline=None)
@given(
    mbit=st.sampled_from(RATES),
    option=st.sampled_from(PLANS),
    ranks=st.sampled_from((2, 8)),
    waited=st.sampled_from((0.0, 0.01)),
    spoil=spoils,
)
def test_a_spoilt_window_never_makes_the_plan_worse(
    mbit: float, option: Option, ranks: int, waited: float, spoil: Spoil
) -> None:
    base = healthy(mbit, option, ranks, waited)
    outcome = decide(spoil(base))
    if outcome.outcome == "switch":
        present = (option,) * len(base.layout.buckets)
        assert cost(base, outcome.options) <= cost(base, present) * (1 + 1e-9), outcome.reason
    else:
        assert outcome.outcome in ("keep", "probe")


@pytest.mark.parametrize("spoil", [sick_buckets("energy", math.nan, 1), slow_rank])
def test_a_healthy_window_after_a_spoilt_one_is_decided_as_if_nothing_had_been(
    spoil: Spoil,
) -> None:
    base = healthy(20.0, DENSE, 8, 0.0)
    assert decide(base).outcome == "switch"
    spoilt = decide(spoil(base))
    assert spoilt.outcome == "keep"
    assert "seen twice" in spoilt.reason or "impossible numbers" in spoilt.reason
    assert spoilt.history is not None
    later = decide(replace(base, history=spoilt.history, link=spoilt.link))
    assert later.outcome == "switch"
    assert later.options == decide(base).options


def test_a_change_that_stays_is_acted_on_at_the_second_look() -> None:
    base = healthy(10_000.0, BF16, 8, 0.0)
    assert all(option.ratio == 1 for option in decide(base).options)
    slow = scenario.operations(ALPHA, 8e-6 / 20, 8, repeats=20, age=0.5)
    changed = replace(base, operations=slow)
    first = decide(changed)
    assert first.outcome == "keep"
    assert "wire time of a dense step" in first.reason
    assert first.history is not None
    second = decide(replace(changed, history=first.history, link=first.link))
    assert second.outcome == "switch"
    assert second.options[0].ratio < 1

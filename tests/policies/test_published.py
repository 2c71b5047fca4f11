from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.history import History, stored_history
from gradpilot.policies.published import answer, labels, recall, remember, unmeasured
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import BF16, DENSE, LinkEstimate, Option, check_option
from tests.policies import scenario
from tests.policies.test_adaptive import wild_inputs

LINK = LinkEstimate(1e-3, 8e-8)
TOPK = Option("topk", 0.01, "allgather")


@dataclass(frozen=True, slots=True)
class State:
    number: float
    many: tuple[int, ...] = ()


def test_memory_comes_back_to_its_owner_only() -> None:
    made = scenario.inputs()
    assert recall(made, "mine", State) is None
    state = State(math.inf, (1, 2))
    later = replace(made, history=remember(made, "mine", state))
    assert recall(later, "mine", State) == state
    assert recall(later, "other", State) is None
    assert recall(replace(later, layout=scenario.layout((5,))), "mine", State) is None
    # What the store keeps of a decision is its inputs as text.
    assert recall(replace(made, history=stored_history(to_json(later))), "mine", State) == state


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"policy":"mine","layout":1,"state":""}'])
def test_a_foreign_text_is_ignored(text: str) -> None:
    assert recall(scenario.inputs(history=History(own=text)), "mine", State) is None


def test_a_state_of_another_version_is_ignored() -> None:
    made = scenario.inputs()
    history = remember(made, "mine", scenario.settings())
    assert recall(replace(made, history=history), "mine", State) is None


def test_the_rest_of_the_history_stays() -> None:
    made = scenario.inputs(history=History(snr=0.5))
    assert remember(made, "mine", State(1.0)).snr == 0.5


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
def test_what_is_not_measured_is_named(wrong: float) -> None:
    made = scenario.inputs()
    assert unmeasured(made) == ""

    def with_second(**fields: object) -> Inputs:
        second = replace(made.buckets[1], **fields)  # type: ignore[arg-type]
        return replace(made, buckets=(made.buckets[0], second, made.buckets[2]))

    assert "bucket 1 has no usable gradient norm" in unmeasured(with_second(gradient_sq=wrong))
    for curve in ((), (0.5,), (wrong, *scenario.ENERGY[1:])):
        assert "bucket 1 has no usable energy curve" in unmeasured(with_second(energy=curve))
        assert unmeasured(with_second(energy=curve), energy=False) == ""


def test_switch_keep_and_wait() -> None:
    made = scenario.inputs(mbit=100)
    wanted = (TOPK,) * 3
    first = answer(made, wanted, "why", LINK)
    assert (first.outcome, first.options, first.current) == ("switch", wanted, None)
    assert first.reason == "switch to topk 1% allgather (first plan). why"
    assert first.chosen is not None
    assert 0 < first.chosen.gain < 1
    running = replace(made, current=scenario.plan(made.layout, (BF16,) * 3))
    other = answer(running, wanted, "why", LINK)
    assert other.outcome == "switch"
    assert other.current is not None
    assert other.current.options == (BF16,)
    assert other.chosen == first.chosen
    same = answer(running, (BF16,) * 3, "why", LINK)
    assert (same.outcome, same.options) == ("keep", ())
    early = answer(replace(running, steps_since_switch=19), wanted, "why", LINK)
    assert (early.outcome, early.options) == ("keep", ())
    assert "only 19 of 20 steps" in early.reason


def test_no_prediction_without_a_link_a_family_or_a_time() -> None:
    made = scenario.inputs(link=LINK)
    unknown = answer(made, (TOPK,) * 3, "why", None)
    assert (unknown.chosen, unknown.link) == (None, LINK)
    strange = (Option("unheard"),) * 3
    assert answer(made, strange, "why", LINK).chosen is None
    untimed = replace(made, compute=())
    assert answer(untimed, (TOPK,) * 3, "why", LINK).chosen is None
    assert answer(untimed, (DENSE,) * 3, "why", LINK).chosen is not None


def test_many_options_are_shortened() -> None:
    options = [Option("topk", ratio, "allgather") for ratio in (0.1, 0.02, 0.1, 0.03, 0.04, 0.05)]
    assert labels(options[:2]) == "topk 10% allgather + topk 2% allgather"
    assert labels(options).endswith(" + 1 more")


def test_every_policy_says_where_it_comes_from() -> None:
    for name in POLICIES:
        policy = POLICIES.get(name)
        assert policy.source
        assert policy.uses or name == "fixed"
        assert policy.grain.startswith(("uniform", "per bucket"))


RIVALS = sorted(set(POLICIES.names()) - {"adaptive", "fixed"})


@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(wild_inputs(), st.sampled_from(RIVALS), st.integers(0, 3), st.booleans())
def test_anything_is_survived(inputs: Inputs, policy: str, more: int, measured: bool) -> None:
    if measured:  # else most end at the first look at the gradients
        states = tuple(replace(b, gradient_sq=1.0, energy=scenario.ENERGY) for b in inputs.buckets)
        inputs = replace(inputs, buckets=states)
    for _ in range(1 + more):  # its own memory of strange inputs is one more of them
        outcome = POLICIES.get(policy)().decide(inputs)
        assert outcome.outcome in ("switch", "keep", "probe")
        assert outcome.reason
        assert from_json(Outcome, to_json(outcome)).reason == outcome.reason
        if outcome.outcome == "switch":
            assert len(outcome.options) == len(inputs.layout.buckets)
        for option in outcome.options:
            check_option(option, inputs.world_size)
        if outcome.history is not None:
            inputs = replace(inputs, history=outcome.history, step=inputs.step + 300)

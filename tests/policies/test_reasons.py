from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradpilot.policies import reasons
from gradpilot.policies.base import PolicySettings
from gradpilot.policies.choice import choose
from gradpilot.policies.history import GainRecord, History
from gradpilot.policies.problem import Space
from gradpilot.protos.messages import BF16, LinkEstimate, Option
from tests.policies import scenario

TOPK = Option("topk", 0.01, "allgather")
LINK = LinkEstimate(1e-3, 8e-6 / 20, samples=12)


def space(**fields: object) -> Space:
    return Space(scenario.inputs(mbit=20, **fields), LINK)  # type: ignore[arg-type]


@pytest.mark.parametrize(("switch", "verb"), [(True, "switch to"), (False, "kept; best is")])
def test_headline_names_the_choice_and_the_verdict(switch: bool, verb: str) -> None:
    made = space()
    evaluation = made.uniform()
    choice = choose(evaluation, PolicySettings())
    assert choice is not None
    chosen = made.candidate(evaluation, choice.index)
    text = reasons.headline(switch, "saves 12.0 %", chosen, choice)
    assert text.startswith(f"{verb} {chosen.options[0].label} (saves 12.0 %)")
    assert f"efficiency {chosen.efficiency:.2f}" in text
    nothing = reasons.headline(switch, "why", chosen, replace(choice, pays=False))
    assert "no compression pays" in nothing


def test_the_plan_compared_with_is_named() -> None:
    inforce = space(current=BF16)
    assert "in force: bf16 native" in reasons.versus(inforce, inforce.present())
    assert "not known" in reasons.versus(space(), None)
    odd = space(start=Option("unheard"))
    assert "unheard native, which the catalog does not have" in reasons.versus(odd, odd.present())


def test_experience_counts_for_what_is_not_in_use() -> None:
    made = space(current=BF16, history=History(gains=(GainRecord("topk", (), 0.01, 0.5, 900),)))
    k = made.add(TOPK)
    assert k is not None
    evaluation = made.evaluate(np.full((1, 3), k, dtype=np.intp))
    (text,) = reasons.experience(made.inputs, made, made.candidate(evaluation, 0))
    assert text == "gain of topk 1% allgather was 0.50 of the predicted one 100 steps ago"
    used = space(current=TOPK, history=made.inputs.history)
    present = used.present()
    assert present is not None
    assert reasons.experience(used.inputs, used, used.candidate(present, 0)) == []


def test_network_and_carriers_have_numbers() -> None:
    made = space()
    assert "link 1 ms, 0.02 Gbit/s from 12 collectives" in reasons.network(made.inputs, LINK)
    evaluation = made.uniform()
    choice = choose(evaluation, PolicySettings())
    assert choice is not None
    (text,) = reasons.carriers(made, evaluation, choice)
    assert "all-gather" in text
    assert "all-reduce" in text
    dense = int(np.flatnonzero(evaluation.safe)[0])
    assert reasons.carriers(made, evaluation, replace(choice, index=dense)) == []

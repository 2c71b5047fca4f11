"""The guards together: what the adaptive policy does about overflows, residuals and phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gradpilot.policies.base import POLICIES, Inputs, Outcome, PolicySettings
from gradpilot.policies.blacklist import banned_again
from gradpilot.policies.history import History
from gradpilot.policies.problem import Space
from gradpilot.policies.watching import watch
from gradpilot.protos.messages import BF16, DENSE, Family, LinkEstimate, Option
from gradpilot.warm_up import STABLE_LOOKS
from tests.policies import scenario

TOPK = Option("topk", 0.03, "allgather")
MBIT = 100.0
LINK = LinkEstimate(1e-3, 8e-6 / MBIT)
Change = Callable[[Inputs, int], Inputs]


def decide(inputs: Inputs) -> Outcome:
    return POLICIES.get("adaptive")().decide(inputs)


def follow(
    looks: int, change: Change, option: Option = DENSE, history: History | None = None
) -> list[tuple[Option, Outcome]]:
    """Return the option in use and the outcome of decisions every 50 steps."""
    base = scenario.inputs(mbit=MBIT)
    if history is not None:
        base = replace(base, history=history)
    since, found = 0, []
    for look in range(1, looks + 1):
        current = scenario.plan(base.layout, (option,) * 3)
        inputs = replace(
            base, step=50 * look, current=current, steps_since_switch=50 * look - since
        )
        outcome = decide(change(inputs, look))
        found.append((option, outcome))
        assert outcome.history is not None
        base = replace(base, history=outcome.history, link=outcome.link)
        if outcome.outcome == "switch":
            option, since = outcome.options[0], 50 * look
    return found


def compresses(inputs: Inputs) -> bool:
    return inputs.current is not None and inputs.current.options()[0].ratio < 1


def unchanged(inputs: Inputs, look: int) -> Inputs:
    return inputs


# --- overflows -----------------------------------------------------------------------------------


def test_overflows_that_come_with_compression_end_it() -> None:
    seen = 0

    def overflowing(inputs: Inputs, look: int) -> Inputs:
        nonlocal seen
        seen += 20 * compresses(inputs)
        return replace(inputs, nonfinite_steps=seen)

    found = follow(30, overflowing)
    undone = [(i, o) for i, (_, o) in enumerate(found) if o.undone]
    assert undone
    at, outcome = undone[0]
    assert outcome.undone == "nonfinite"
    assert set(outcome.options) <= {DENSE, BF16}
    assert "non-finite gradients" in outcome.reason
    assert "black-listed" in outcome.reason
    left = found[at][0]
    assert all(option.family != left.family or option == left for option, _ in found[at + 1 :])
    assert found[-1][0].ratio == 1 or found[-1][0].family != left.family


def test_overflows_that_come_with_dense_as_well_change_nothing() -> None:
    wait = PolicySettings(dwell_steps=150)  # so that dense is seen first
    found = follow(
        20, lambda inputs, look: replace(inputs, nonfinite_steps=5 * look, settings=wait)
    )
    assert not any(outcome.undone for _, outcome in found)
    assert any(option.ratio < 1 for option, _ in found)
    assert "the model's own" in found[2][1].reason


def test_bf16_that_overflows_goes_to_fp32_and_is_pardoned_if_that_does_too() -> None:
    def overflowing(inputs: Inputs, look: int) -> Inputs:
        bf16 = inputs.current is not None and inputs.current.options() == (BF16,)
        count = 20 * look if bf16 or look > 6 else 20 * 4
        return replace(inputs, nonfinite_steps=count, families=only_whole(inputs))

    found = follow(12, overflowing, BF16)
    undone = [o for _, o in found if o.undone]
    assert undone[0].undone == "nonfinite"
    assert set(undone[0].options) == {DENSE}
    banned = undone[0].history
    assert banned is not None
    assert [ban.compressor for ban in banned.bans] == ["bf16"]
    last = found[-1][1].history
    assert last is not None
    assert last.bans == ()  # since it overflows under fp32 as well


def only_whole(inputs: Inputs) -> tuple[Family, ...]:
    return tuple(f for f in inputs.families if f.compressor in ("none", "bf16"))


# --- residuals -----------------------------------------------------------------------------------


def test_a_residual_that_outgrows_the_gradient_is_sent_and_its_option_banned() -> None:
    def growing(inputs: Inputs, look: int) -> Inputs:
        if not compresses(inputs):
            return inputs
        states = tuple(
            replace(b, residual_sq=99.0 * b.gradient_sq, gradient_sq=100.0 * b.gradient_sq)
            for b in inputs.buckets
        )
        return replace(inputs, buckets=states)

    found = follow(12, growing)
    undone = [o for _, o in found if o.undone]
    assert undone[0].undone == "residual"
    assert set(undone[0].options) <= {DENSE, BF16}  # these send what was held back
    assert "99 times the gradient" in undone[0].reason
    history = undone[0].history
    assert history is not None
    assert history.bans[0].cause == "residual"


# --- phases --------------------------------------------------------------------------------------


def ratio_of(outcome: Outcome) -> float:
    assert outcome.chosen is not None
    return outcome.chosen.gain


def test_a_run_starts_mild_and_gets_bold_when_it_is_settled() -> None:
    found = follow(STABLE_LOOKS + 4, unchanged, history=History())
    gains = [ratio_of(outcome) for _, outcome in found]
    assert gains[0] >= 0.7
    assert "warm-up, gain floor 0.7" in found[0][1].reason
    assert gains[-1] < 0.7
    assert all(gain >= 0.7 for gain in gains[:STABLE_LOOKS])
    assert found[0][1].outcome == "switch"  # mild compression need not wait


def test_a_run_that_never_settles_keeps_the_floor_and_keeps_what_it_has() -> None:
    def falling(inputs: Inputs, look: int) -> Inputs:
        states = tuple(replace(b, gradient_sq=b.gradient_sq * 0.2**look) for b in inputs.buckets)
        return replace(inputs, buckets=states)

    found = follow(12, falling, TOPK, History())
    assert all(outcome.chosen is None or ratio_of(outcome) >= 0.45 for _, outcome in found)
    assert "warm-up" in found[-1][1].reason


@pytest.mark.parametrize("kind", ["lr", "norm"])
def test_a_critical_phase_is_mild_and_ends(kind: str) -> None:
    def step(inputs: Inputs, look: int) -> Inputs:
        if kind == "lr":
            return replace(inputs, lr=0.1 if look < 10 else 0.01)
        scale = 1.0 if look < 10 else 100.0
        states = tuple(replace(b, gradient_sq=scale * b.gradient_sq) for b in inputs.buckets)
        return replace(inputs, buckets=states)

    found = follow(40, step)
    critical = [i for i, (_, o) in enumerate(found) if "critical phase" in o.reason]
    assert critical
    assert critical[0] in (9, 10)
    assert len(critical) <= STABLE_LOOKS + 2
    word = "learning rate went from 0.1 to 0.01" if kind == "lr" else "norm or noise changed"
    assert word in found[critical[0]][1].reason
    gains = [ratio_of(outcome) for _, outcome in found]
    assert gains[8] < 0.7
    assert min(gains[i] for i in critical) >= 0.7
    assert gains[-1] < 0.7


# --- as a whole ----------------------------------------------------------------------------------


def test_a_look_changes_nothing_but_its_own_part_of_the_history() -> None:
    inputs = scenario.inputs(mbit=MBIT, current=TOPK)
    own = replace(inputs.history, own="mine", snr=3.0)
    inputs = replace(inputs, history=own)
    space = Space(inputs, LINK)
    found = watch(inputs, space, LINK, space.present())
    assert (found.doubt, found.cause, found.bans) == ("", "", ())
    assert found.history.own == "mine"
    assert found.history.departures == own.departures
    assert not found.banned(space).any()
    assert found.settings(inputs) == replace(inputs.settings, gain_floor=found.floor)
    outcome = decide(inputs)
    assert outcome.history is not None
    assert outcome.history.own == "mine"


def test_black_listed_options_are_not_candidates() -> None:
    inputs = scenario.inputs(mbit=MBIT, settings=PolicySettings(per_bucket=False))
    first = decide(replace(inputs, current=scenario.plan(inputs.layout, (DENSE,) * 3)))
    assert first.chosen is not None
    best = first.chosen.options[0]
    bans = banned_again(inputs, (best,), "residual", LINK)
    history = replace(inputs.history, bans=bans)
    second = decide(
        replace(
            inputs,
            current=scenario.plan(inputs.layout, (DENSE,) * 3),
            history=history,
        )
    )
    assert second.chosen is not None
    other = second.chosen.options[0]
    assert other.family != best.family or other.ratio > best.ratio
    assert f"{best.label} is black-listed for 1000 more steps" in second.reason
    # In force it must go.
    forced = decide(
        replace(inputs, current=scenario.plan(inputs.layout, (best,) * 3), history=history)
    )
    assert forced.outcome == "switch"
    assert "the plan in force is black-listed" in forced.reason

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.gravac import PUBLISHED, GraVAC, Published, State
from gradpilot.policies.published import recall
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import BF16, DENSE, ENERGY_RATIOS, Option
from tests.policies import scenario


def inputs(power: float, **fields: object) -> Inputs:
    """Return inputs with gain = ratio ** power in every bucket."""
    made = scenario.inputs(mbit=100)
    energy = tuple(ratio**power for ratio in ENERGY_RATIOS)
    states = tuple(replace(b, energy=energy) for b in made.buckets)
    return replace(made, buckets=states, **fields)  # type: ignore[arg-type]


def train(
    start: Inputs,
    looks: int,
    seconds: Callable[[float], float],
    constants: Published = PUBLISHED,
    steps: int = 250,
) -> list[tuple[float, Outcome, State]]:
    """Decide again and again; return the factor in use after every look, the answer, the state."""
    policy, now, told = GraVAC(constants), start, []
    for _ in range(looks):
        outcome = policy.decide(now)
        assert outcome.history is not None
        history = from_json(type(outcome.history), to_json(outcome.history))
        plan = scenario.plan(now.layout, outcome.options) if outcome.options else now.current
        now = replace(now, history=history, current=plan, step=now.step + steps)
        state = recall(now, "gravac", State)
        assert state is not None
        assert plan is not None
        (option,) = plan.options()
        factor = round(1 / option.ratio, 3)
        now = replace(now, step_seconds=seconds(factor), steps_since_switch=steps)
        told.append((factor, outcome, state))
    return told


def used(told: list[tuple[float, Outcome, State]]) -> list[float]:
    return [factor for factor, _, _ in told]


def test_compression_grows_window_by_window_while_it_pays() -> None:
    """Gains stay above eps, steps get faster in proportion: 2, 4, 16 times the floor, then all."""
    told = train(inputs(0.04), 10, lambda factor: 1 / factor)
    assert used(told)[:7] == [20, 20, 40, 40, 160, 160, 1000]
    assert told[0][1].outcome == "switch"
    assert told[-1][2].settled == 1000
    assert "search ended" in told[-1][1].reason


def test_geometric_growth() -> None:
    told = train(inputs(0.04), 8, lambda factor: 1 / factor, Published(growth="geometric"))
    assert used(told) == [20, 20, 40, 40, 80, 80, 160, 160]


def test_the_search_ends_where_throughput_no_longer_grows() -> None:
    """Beyond 40x nothing gets faster, but gain falls: the best product is kept."""
    told = train(inputs(0.05), 12, lambda factor: 1 / min(factor, 40))
    assert told[-1][2].settled == 40
    assert used(told)[-1] == 40


def test_of_two_equal_throughputs_the_milder_factor_is_kept() -> None:
    """What steps get faster just makes up for what gain falls."""
    told = train(inputs(0.04), 6, lambda factor: factor**-0.04)
    assert told[-1][2].settled == 20
    assert used(told)[-1] == 20


def test_a_strong_factor_that_loses_nothing_becomes_the_floor() -> None:
    told = train(inputs(0.001), 3, lambda factor: 1 / factor)
    assert told[-1][2].floor == 20
    assert "floor raised from 10x to 20x" in told[2][1].reason
    # The gain of 4 times the new floor is what is watched next.
    assert used(told)[-1] == 80


def test_gain_decides_between_strong_floor_and_dense() -> None:
    # gain at 10x and 20x: .794 and .741, .724 and .659, .631 and .549
    strong, floor, dense = (
        GraVAC().decide(inputs(power, current=None)).options[0] for power in (0.1, 0.14, 0.2)
    )
    assert strong == Option("topk", 0.05, "allgather")
    assert floor == Option("topk", 0.1, "allgather")
    assert dense == DENSE
    careful = Published(eps=0.9)
    assert GraVAC(careful).decide(inputs(0.1)).options[0] == DENSE


def test_a_falling_gain_goes_back_at_the_next_look() -> None:
    first = train(inputs(0.1), 1, lambda factor: 1.0)[0]
    assert first[0] == 20
    later = inputs(
        0.4, step=1100, history=first[1].history,
        current=scenario.plan(inputs(0.1).layout, first[1].options),
    )  # fmt: skip
    back = GraVAC().decide(later)
    assert back.options == (DENSE,) * 3
    assert "is below 0.7" in back.reason


def test_gains_are_smoothed_by_n_percent_a_step() -> None:
    first = train(inputs(0.1), 1, lambda factor: 1.0)[0]
    later = inputs(0.4, step=1005, history=first[1].history)
    state = recall(replace(later, history=GraVAC().decide(later).history), "gravac", State)  # type: ignore[arg-type]
    assert state is not None
    old, new, left = 0.1**0.1, 0.1**0.4, (1 - 0.08) ** 5
    assert state.gains[0] == pytest.approx(left * old + (1 - left) * new, rel=0.02)


def test_throughput_is_gain_per_second_of_what_is_in_use() -> None:
    made = inputs(0.1)
    for option, gain, factor in (
        (DENSE, 1.0, 1.0),
        (Option("topk", 0.05, "allgather"), 0.6, 20.0),
        (Option("topk", 0.05, "allgather"), -1.0, 20.0),
    ):
        states = tuple(replace(b, gain=gain) for b in made.buckets)
        now = replace(
            made,
            buckets=states,
            step_seconds=0.2,
            current=scenario.plan(made.layout, (option,) * 3),
        )
        outcome = GraVAC().decide(now)
        state = recall(replace(now, history=outcome.history), "gravac", State)  # type: ignore[arg-type]
        assert state is not None
        (point,) = state.measured
        assert point.factor == factor
        expected = gain if gain > 0 else 0.05**0.1
        assert point.value == pytest.approx(expected / 0.2, rel=0.02)
    other = replace(made, step_seconds=0.2, current=scenario.plan(made.layout, (BF16,) * 3))
    state = recall(replace(made, history=GraVAC().decide(other).history), "gravac", State)  # type: ignore[arg-type]
    assert state is not None
    assert state.measured == ()


def test_another_layout_or_an_earlier_step_starts_over() -> None:
    told = train(inputs(0.04), 4, lambda factor: 1 / factor)
    history = told[-1][1].history
    assert history is not None
    again = inputs(0.04, step=10, history=history)
    assert GraVAC().decide(again).options[0].ratio == 0.05
    other = scenario.inputs(sizes=(10_000, 20_000), history=history)
    assert recall(other, "gravac", State) is None


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
def test_impossible_measurements_keep_the_plan(wrong: float) -> None:
    made = inputs(0.1)
    broken = (replace(made.buckets[0], energy=(wrong,) * 13), *made.buckets[1:])
    assert GraVAC().decide(replace(made, buckets=broken)).outcome == "keep"
    # A step time that cannot be is no throughput.
    timed = replace(made, step_seconds=wrong, current=scenario.plan(made.layout, (DENSE,) * 3))
    outcome = GraVAC().decide(timed)
    assert "gain per second: none yet" in outcome.reason


def test_without_topk_or_a_timed_link() -> None:
    made = inputs(0.1)
    none = tuple(f for f in made.families if f.compressor != "topk")
    assert "no topk" in GraVAC().decide(replace(made, families=none)).reason
    assert GraVAC().decide(replace(made, operations=())).outcome == "switch"

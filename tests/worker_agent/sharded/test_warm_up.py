"""The warm-up rule as agents of sharded models apply it."""

from __future__ import annotations

import math

from gradpilot.worker_agent.sharded.warm_up import LOOK_STEPS, WarmUp


def looks(rule: WarmUp, values: list[tuple[float, float]], first: int = 0) -> None:
    for number, (gradient_sq, mean_sq) in enumerate(values):
        rule.look((first + number) * LOOK_STEPS, gradient_sq, mean_sq)


def test_stable_looks_in_a_row_make_it_warm() -> None:
    rule = WarmUp(needed=True)
    looks(rule, [(4.0, 1.0)] * 3)
    assert not rule.warm
    looks(rule, [(4.1, 1.02)], first=3)
    assert rule.warm


def test_falling_gradients_and_unknown_ones_do_not() -> None:
    rule = WarmUp(needed=True)
    looks(rule, [(4.0 * 0.7**t, 0.7**t) for t in range(12)])
    assert not rule.warm
    looks(rule, [(math.nan, math.nan), (0.0, 0.0)] * 5, first=12)
    assert not rule.warm


def test_a_change_by_half_makes_it_cold_again() -> None:
    rule = WarmUp(needed=True)
    looks(rule, [(4.0, 1.0)] * 4)
    assert rule.warm
    # The look after the switch is smaller because contributions are missing: no change.
    looks(rule, [(4.0, 0.3), (4.0, 0.3)], first=4)
    assert rule.warm
    looks(rule, [(100.0, 90.0)], first=6)
    assert not rule.warm


def test_which_steps_are_looked_at_and_what_a_checkpoint_keeps() -> None:
    rule = WarmUp(needed=True)
    assert [t for t in range(25) if rule.wants(t)] == [0, LOOK_STEPS, 2 * LOOK_STEPS]
    looks(rule, [(4.0, 1.0)] * 4)
    again = WarmUp(needed=True)
    again.load_state_dict(rule.state_dict())
    assert again.warm
    never = WarmUp(needed=False)
    assert never.warm
    assert not never.wants(0)

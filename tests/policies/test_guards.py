from __future__ import annotations

import math

import pytest

from gradpilot.policies.base import Outcome
from gradpilot.policies.dwell import Dwell
from gradpilot.policies.guards import Verdict, judge, sane, settle, undo
from gradpilot.protos.messages import BF16, DENSE
from tests.policies import scenario


def test_sane() -> None:
    assert sane(scenario.inputs()) == ""


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"world_size": 1}, "one rank"),
        ({"layout": scenario.layout(())}, "no buckets"),
        ({"buckets": ()}, "another layout"),
        ({"families": ()}, "catalog"),
        ({"compute_seconds": math.nan}, "nan"),
        ({"compute_seconds": -1.0}, "-1"),
    ],
)
def test_insane(fields: dict[str, object], word: str) -> None:
    assert word in sane(scenario.inputs(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("current", "steps", "gain", "switch", "word"),
    [
        (None, 0, math.nan, True, "first"),
        (BF16, 1000, 0.9, False, "already"),
        (DENSE, 19, 0.9, False, "19 of 20"),
        (DENSE, 20, 0.049, False, "4.9 %"),
        (DENSE, 20, -0.3, False, "-30.0 %"),
        (DENSE, 20, 0.05, True, "5.0 %"),
        (DENSE, 20, math.nan, True, "cannot be predicted"),
    ],
)
def test_judge(current: object, steps: int, gain: float, switch: bool, word: str) -> None:
    inputs = scenario.inputs(steps_since_switch=steps)
    verdict = judge(inputs, () if current is None else (current,), (BF16,), gain)  # type: ignore[arg-type]
    assert verdict.switch is switch
    assert word in verdict.reason


@pytest.mark.parametrize(("steps", "switch"), [(19, False), (20, True)])
def test_a_plan_below_the_floor_goes_at_any_cost(steps: int, switch: bool) -> None:
    inputs = scenario.inputs(steps_since_switch=steps)
    verdict = judge(inputs, (DENSE,), (BF16,), -0.5, permitted=False)
    assert verdict.switch is switch
    assert not switch or "gain floor" in verdict.reason


@pytest.mark.parametrize(("steps", "switch"), [(79, False), (80, True)])
def test_a_plan_that_was_left_comes_back_later(steps: int, switch: bool) -> None:
    inputs = scenario.inputs(steps_since_switch=steps)
    verdict = judge(inputs, (DENSE,), (BF16,), 0.5, needed=Dwell(80, 2))
    assert verdict.switch is switch
    assert switch or "79 of 80 steps" in verdict.reason
    assert switch or "left 2 times lately" in verdict.reason
    # What is below the gain floor does not wait for so long.
    assert judge(inputs, (DENSE,), (BF16,), 0.5, permitted=False, needed=Dwell(80, 2)).switch


def test_a_probe_under_way_is_not_asked_again() -> None:
    wanted = Outcome("probe", "cannot tell", probe_bytes=(4096, 1 << 20))
    assert settle(wanted, scenario.inputs()) is wanted
    settled = settle(wanted, scenario.inputs(probing=7))
    assert (settled.outcome, settled.probe_bytes) == ("keep", ())
    assert "probe of decision 7" in settled.reason
    assert "cannot tell" in settled.reason
    kept = Outcome("keep", "why")
    assert settle(kept, scenario.inputs(probing=7)) is kept


def test_doubt_stops_every_switch() -> None:
    inputs = scenario.inputs()
    for current in ((), (DENSE,)):
        verdict = judge(inputs, current, (BF16,), 0.9, permitted=False, doubt="odd numbers")
        assert (verdict.switch, verdict.reason) == (False, "odd numbers")


def test_the_reason_why_a_plan_must_go_is_told() -> None:
    verdict = judge(scenario.inputs(), (DENSE,), (BF16,), -0.5, permitted=False, why="is banned")
    assert verdict.reason == "the plan in force is banned"


def test_undo_needs_somewhere_to_go() -> None:
    assert undo((BF16,), (DENSE,), "it crawls") == Verdict(True, "undone: it crawls")
    kept = undo((DENSE,), (DENSE,), "it crawls")
    assert not kept.switch
    assert "nothing safer" in kept.reason

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.demo.schedule import LEAST_STEPS, Phase, Schedule, make_schedule
from gradpilot.errors import ConfigError


@settings(max_examples=50, deadline=None)
@given(st.booleans(), st.integers(LEAST_STEPS, 5000))
def test_every_step_belongs_to_the_phase_that_spans_it(quick: bool, steps: int) -> None:
    schedule = make_schedule(quick, steps)
    spans = list(schedule.spans())
    assert [phase.name for phase, _ in spans] == ["fast", "slow", "high latency", "fast"]
    assert spans[-1][1] == schedule.steps == steps
    for phase, end in spans:
        assert schedule.at(phase.first_step) is phase
        assert schedule.at(end - 1) is phase


def test_steps_beyond_the_end_have_the_last_link() -> None:
    schedule = make_schedule()
    assert schedule.at(10**6) is schedule.phases[-1]


def test_beta_is_the_time_to_push_a_byte() -> None:
    assert Phase("x", 0, 0.0, 8e6).beta == pytest.approx(1e-6)


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 50, 20), (0, 100)])
def test_gaps_and_overlaps_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="step 0"):
        Schedule(tuple(Phase("x", start, 0.0, 1e9) for start in starts), 100)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match=str(LEAST_STEPS)):
        make_schedule(steps=LEAST_STEPS - 1)

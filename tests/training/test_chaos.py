"""Ten of the schedules that ``make chaos`` goes through."""

from __future__ import annotations

import pytest

from bench.chaos.run import RANKS, disturb

SCHEDULES = 10
SEED = 6
"""Two of its first ten schedules kill the controller, and every kind of fault is among them."""


@pytest.mark.processes
@pytest.mark.timeout(150)
def test_faults_between_controller_and_ranks_neither_hang_nor_part_the_ranks() -> None:
    found = disturb(SCHEDULES, SEED)
    assert found.hangs == []
    assert (found.schedules, found.mixed, found.diverged) == (SCHEDULES, [], [])
    assert found.kills == 2
    assert sum(found.faults.values()) >= SCHEDULES / 2, "faults met plans"
    assert found.steps > 12 * SCHEDULES
    assert len(found.ranks) == RANKS
    for counted in found.ranks:
        assert counted["frozen"] == ""
        assert counted["switches"] >= SCHEDULES, "every schedule ends under another option"

"""What policies believe of our all-reduces is what the agent's schedules do."""

from __future__ import annotations

import pytest

from gradpilot.policies.skipping import SKIPPING, contributions, most_skipped
from gradpilot.protos.messages import CARRIERS, UNSKIPPABLE
from gradpilot.worker_agent.collectives.base import SCHEDULES


def test_all_of_them_are_known() -> None:
    assert sorted(SKIPPING) == list(SCHEDULES.names())
    assert set(SKIPPING) == set(CARRIERS) - set(UNSKIPPABLE)


@pytest.mark.parametrize("name", SKIPPING)
def test_as_the_schedules_do(name: str) -> None:
    for n in range(1, 20):
        algorithm = SCHEDULES.get(name)
        assert most_skipped(name, n) == algorithm.most_skipped(n)
        for skip in range(-1, n + 2):
            built = algorithm.build(0, n, skip=skip)
            assert contributions(name, n, skip) == built.contributions, (n, skip)


@pytest.mark.parametrize("name", UNSKIPPABLE)
def test_others_skip_nothing(name: str) -> None:
    assert most_skipped(name, 8) == 0
    assert contributions(name, 8, 3) == 8

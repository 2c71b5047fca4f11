"""What rows of ``bench.agent_cost`` come to. ``tests/end_to_end/test_agent_cost.py`` measures."""

from __future__ import annotations

from typing import Any

import pytest

from bench import agent_cost


def rows(**changes: Any) -> list[dict[str, Any]]:
    """Return the rows of two ranks; changes apply to rank 1."""
    made = []
    for rank in range(2):
        values = {"agent": 0.006, "main": 0.11, "growth": -0.2, "frozen": "", "pace": 100.0}
        if rank == 1:
            values |= changes
        for steps, thread, share in (
            (agent_cost.MANAGED, agent_cost.ALL, values["agent"]),
            (agent_cost.MANAGED, "main", values["main"]),
            (agent_cost.HOOKED, "main", 0.1),
            (agent_cost.PLAIN, "main", 0.095),
        ):
            made.append(
                {
                    "case": "cpu",
                    "rank": rank,
                    "steps": steps,
                    "thread": thread,
                    "steps_per_s": values["pace"],
                    "share_mean": share,
                    "share_median": share,
                }
            )
        made.append(
            {
                "case": "memory",
                "rank": rank,
                "steps": 2000,
                "switches": 100,
                "last_half_growth_mb": values["growth"],
                "frozen": values["frozen"],
            }
        )
    return made


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, []),
        ({"agent": 0.03}, [0]),
        ({"pace": 60.0}, [0]),
        ({"main": 0.118}, [1]),
        ({"main": 0.13}, [1, 2]),
        ({"growth": 1.5}, [3]),
        ({"frozen": "the control group failed"}, [3]),
    ],
    ids=str,
)
def test_the_worst_rank_decides(changes: dict[str, Any], failing: list[int]) -> None:
    verdicts = agent_cost.judge(rows(**changes))
    assert [i for i, one in enumerate(verdicts) if not one["holds"]] == failing

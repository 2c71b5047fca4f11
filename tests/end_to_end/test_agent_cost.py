"""What the agent takes of a core and of memory: a short run of ``bench.agent_cost``."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bench import agent_cost
from gradpilot.worker_agent.agent import attach
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

SWITCHES = 10
"""Every option comes twice."""


def _measured(rank: int) -> tuple[dict[str, float], dict[str, Any]]:
    job = agent_cost.Job(rank)
    handle = attach(job.net, run=agent_cost.RUN, policy="fixed")
    job.steps(30)
    shares = agent_cost.turn(job, 150, agent_cost.watcher_of(handle))
    over = threading.Event()
    operator = threading.Thread(target=agent_cost.pin, args=(handle.controller, over.is_set))
    if rank == 0:
        operator.start()
    try:
        (memory,) = agent_cost.memory(rank, job, handle, SWITCHES)
    finally:
        over.set()
        if rank == 0:
            operator.join(10)
    return shares, memory


def test_the_agents_threads_take_little_and_memory_stays_flat() -> None:
    ranks = run_ranks(
        _measured,
        agent_cost.RANKS,
        GRADPILOT_CTL_MIN_DECISION_SECONDS="3600",
        GRADPILOT_CTL_POLICY_SETTINGS__INTERVAL=str(agent_cost.INTERVAL),
    )
    for shares, memory in ranks:
        assert shares["gradpilot-agreement"] > 0.0
        assert shares[agent_cost.ALL] < agent_cost.CPU_LIMIT, shares
        assert memory["switches"] >= SWITCHES
        assert memory["frozen"] == ""
        # In so few steps some pages of the allocators are still new.
        assert memory["last_half_growth_mb"] < 3.0, memory

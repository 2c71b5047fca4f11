from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradpilot.worker_agent import groups
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes


def _reuse(rank: int) -> tuple[bool, bool, bool, float]:
    everyone = [0, 1]
    first = groups.acquire(everyone, "gloo")
    second = groups.acquire(everyone, "gloo")
    distinct = first is not second
    groups.release(first)
    third = groups.acquire(everyone, "gloo")
    reused = third is first
    groups.release(second)
    other = groups.acquire([rank], "gloo")  # other ranks, another group
    separate = other is not second
    value = torch.ones(1)
    dist.all_reduce(value, group=third)
    groups.release(third)
    groups.destroy_free()
    return distinct, reused, separate, float(value)


def test_groups_are_lent_once_and_used_again() -> None:
    assert run_ranks(_reuse, 2) == [(True, True, True, 2.0)] * 2

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


def _begins(rank: int) -> tuple[bool, bool, bool]:
    """Meet in a store in which an earlier start of the job has left its addresses."""
    world = dist.group.WORLD
    assert world is not None
    default = groups.store()
    groups.begin(world)
    first = groups.store()
    first.set("key", "of the first start")
    groups.begin(world)
    unknown = not groups.store().check(["key"])
    group = groups.acquire([0, 1], "gloo")
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    again = dist.new_group([0, 1])  # the user's own meet where they did before
    dist.all_reduce(value, group=again)
    same = dist.distributed_c10d._get_default_store() is default
    return unknown, same, float(value) == 4.0


def test_every_start_meets_where_no_other_has_been() -> None:
    assert run_ranks(_begins, 2) == [(True, True, True)] * 2

"""The two halves of a ring with fixed owners: what is summed, what is left out, how many steps."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch

from gradpilot.worker_agent.compressors.base import At
from gradpilot.worker_agent.sharded.ring import (
    gather_schedule,
    omitted_shards,
    ring_order,
    scatter_schedule,
)
from gradpilot.worker_agent.virtual import run_schedules

SIZES = [(n, skip) for n in (2, 3, 4, 5, 8) for skip in range(n)]


def order_of(n: int, step: int) -> tuple[int, ...]:
    return ring_order(At(0, n, step, "unit", seed=3), "random")


@pytest.mark.parametrize(("n", "skip"), SIZES)
def test_owners_get_the_sum_of_what_is_not_omitted(n: int, skip: int) -> None:
    width = 3
    for step in range(3):
        order = order_of(n, step)
        payloads = [torch.randint(-9, 9, (n * width,)).double() for _ in range(n)]
        masked = torch.stack(payloads).view(n, n, width)
        for rank in range(n):
            for shard in omitted_shards(order, rank, skip):
                masked[rank, shard] = 0.0
        run_schedules(payloads, [scatter_schedule(order, r, skip) for r in range(n)])
        for rank in range(n):
            own = payloads[rank].view(n, width)[rank]
            assert torch.equal(own, masked[:, rank].sum(0))


@pytest.mark.parametrize(("n", "skip"), SIZES)
def test_gather_leaves_out_what_the_rank_does_not_contribute_to(n: int, skip: int) -> None:
    order = order_of(n, 1)
    outputs = [torch.full((n * 2,), -1.0) for _ in range(n)]
    for rank in range(n):
        outputs[rank].view(n, 2)[rank] = float(rank)
    run_schedules(outputs, [gather_schedule(order, r, skip) for r in range(n)])
    for rank in range(n):
        omitted = omitted_shards(order, rank, skip)
        expected = [[-1.0 if s in omitted else float(s)] * 2 for s in range(n)]
        assert outputs[rank].view(n, 2).tolist() == expected


@pytest.mark.parametrize(("n", "skip"), SIZES)
def test_steps_and_contributions(n: int, skip: int) -> None:
    order = order_of(n, 2)
    for build in (scatter_schedule, gather_schedule):
        schedules = [build(order, r, skip) for r in range(n)]
        assert {len(s.steps) for s in schedules} == {n - 1 - skip}
        assert {s.contributions for s in schedules} == {n - skip}
        left_out = Counter(shard for s in schedules for shard in s.omitted)
        assert all(left_out[shard] == skip for shard in range(n))
        assert all(rank not in s.omitted for rank, s in enumerate(schedules))


def test_over_many_steps_every_rank_omits_every_other_shard() -> None:
    n, skip = 4, 1
    seen = {
        (r, s)
        for t, r in product(range(60), range(n))
        for s in omitted_shards(order_of(n, t), r, skip)
    }
    assert seen == {(r, s) for r in range(n) for s in range(n) if r != s}


def test_the_order_is_the_same_on_all_ranks_and_changes_with_step_and_unit() -> None:
    orders = {
        (step, unit): {ring_order(At(rank, 8, step, unit), "random") for rank in range(8)}
        for step in range(4)
        for unit in ("a", "b")
    }
    assert all(len(found) == 1 for found in orders.values())
    assert len({next(iter(found)) for found in orders.values()}) > 4
    assert ring_order(At(5, 8, 3, "a"), "static") == tuple(range(8))

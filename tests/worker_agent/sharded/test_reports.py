"""A controller sees a sharded model, and cannot make it change its plan."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradpilot.protos.messages import DENSE, Plan
from tests.ranks import run_ranks
from tests.worker_agent.controllers import FakeController, wait_until
from tests.worker_agent.sharded.jobs import BF16, fully_sharded, loss_of

pytestmark = pytest.mark.processes


def train_until(rank: int, address: str, stop: str) -> tuple[Any, ...]:
    from gradpilot.worker_agent.agent import attach

    net = fully_sharded()
    handle = attach(net, controller=address, run="sharded", start=BF16, report_seconds=0.1)  # type: ignore[arg-type]
    deadline = time.monotonic() + 20
    over = [False]
    while not over[0]:
        for step in range(10):
            loss_of(net, rank, step).backward()
            net.zero_grad()
        over = [Path(stop).exists() or time.monotonic() > deadline]
        dist.broadcast_object_list(over, 0)
    handle.close()
    return handle.run, handle.step, handle.plan, handle.layout, handle.counters.wire_bytes


def test_what_is_measured_is_reported_and_plans_are_turned_down(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    with FakeController() as fake, ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_ranks, train_until, 2, fake.address, str(stop))
        try:
            wait_until(lambda: len(fake.catalogs) == 2 and len(fake.reports) > 2, 25.0)
            layout = fake.catalogs[0].layout
            for session in fake.sessions:
                session.put(Plan(1, 1, layout.digest, default=DENSE))
            wait_until(lambda: len(fake.acks) == 2)
        finally:
            stop.touch()
        results = job.result(30)
    assert {h.rank for h in fake.hellos} == {0, 1}
    assert all(h.plan is not None and h.plan.default == BF16 for h in fake.hellos)
    assert all(c.families == () and len(c.layout.buckets) == 3 for c in fake.catalogs)
    report = fake.reports[-1]
    assert report.layout == layout.digest
    assert report.counters.steps > 0
    assert report.counters.wire_bytes * 2 == report.counters.dense_bytes
    assert report.step_seconds > 0.0
    assert all(b.wire_seconds > 0.0 and b.wire_bytes > 0 for b in report.buckets)
    assert {(a.state, "no controller plans sharded models yet" in a.reason) for a in fake.acks} == {
        ("rejected", True)
    }
    for run, step, plan, seen, wire_bytes in results:
        assert (run, plan.default, seen) == ("sharded", BF16, layout)
        assert step > 0
        assert wire_bytes > 0

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from gradpilot.protos.messages import ProbeRequest, WireSample
from gradpilot.worker_agent.probe import REPETITIONS, measure
from gradpilot.worker_agent.wire import Wire, communication_thread
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def _measured(rank: int) -> list[WireSample]:
    group = dist.group.WORLD
    assert group is not None
    thread = communication_thread(CPU)
    try:
        return measure(ProbeRequest(7, 4096, 1 << 20), 5, Wire(group), thread, CPU)
    finally:
        assert thread.stop()


@pytest.mark.processes
def test_both_sizes_are_timed_alike_on_all_ranks() -> None:
    sizes = [4096] * REPETITIONS + [1 << 20] * REPETITIONS
    for samples in run_ranks(_measured, 2):
        assert [s.bytes for s in samples] == sizes
        assert [s.round for s in samples] == list(range(2 * REPETITIONS))
        assert {(s.step, s.bucket, s.collective, s.skip) for s in samples} == {
            (5, -1, "all_reduce", 0)
        }
        assert all(s.seconds > 0 for s in samples)


class Broken(Wire):
    def probe(self, payload: torch.Tensor, step: int) -> float:
        raise RuntimeError("the link is gone")


def _broken(rank: int) -> tuple[int, bool]:
    group = dist.group.WORLD
    assert group is not None
    thread = communication_thread(CPU)
    samples = measure(ProbeRequest(7, 64, 1024), 5, Broken(group), thread, CPU)
    works = threading.Event()
    thread.submit(works.set)
    return len(samples), works.wait(5)


@pytest.mark.processes
def test_a_probe_that_fails_leaves_the_thread_to_the_buckets() -> None:
    assert run_ranks(_broken, 1) == [(0, True)]

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.protos.messages import BF16, DENSE, Option
from gradpilot.simulate.engine import BLOCK, QUIET, Noise, Weather, part, run_steps, step_seconds
from gradpilot.simulate.jobs import make_job
from gradpilot.simulate.traces import Link
from gradpilot.simulate.world import World

OPTIONS = (DENSE, BF16, Option("none", collective="ring"), Option("topk", 0.01, "allgather"))


@given(
    seed=st.integers(0, 1000),
    ms=st.floats(0, 20),
    gbps=st.floats(0.05, 50),
    model=st.sampled_from(["resnet50", "transformer", "cnn"]),
)
@settings(deadline=None, max_examples=25)
def test_time_is_conserved(seed: int, ms: float, gbps: float, model: str) -> None:
    """A step is never shorter than its slowest rank, nor than the wire, nor longer than both."""
    world, link = World(make_job(model), 8), Link.of(ms, gbps)
    costs = world.costs(OPTIONS)
    block = Weather(world, Noise(hiccups=0.05), seed).block(0)
    every = step_seconds(costs, link, block)
    for k in range(len(OPTIONS)):
        rows = np.full(len(world.job.layout.buckets), k)
        done = run_steps(costs, rows, link, block)
        assert done.seconds == pytest.approx(every[k], rel=1e-12)
        work = done.wire.sum(axis=1) + costs.compress[k].sum() + costs.decompress[k].sum()
        computing = block.last.max(axis=1)
        latency = (costs.alphas[k] * link.alpha * block.wire).max(axis=1)
        assert (done.seconds >= computing - 1e-12).all()
        if not costs.native[k]:
            assert (done.seconds >= block.last[:, 0] + work - 1e-9).all()
        assert (done.seconds <= computing + work + latency + 1e-9).all()
        assert (done.wire >= 0).all()
        assert (done.waits >= -1e-12).all()
        assert (done.waits[0] >= done.waits[1] - 1e-12).all()
        assert done.waits[2] == pytest.approx(0, abs=1e-12)  # nobody waits for who is last


def test_without_noise_nobody_waits_and_all_steps_are_alike() -> None:
    world, link = World(make_job("resnet50"), 8), Link.of(1, 1)
    block = Weather(world, QUIET, 1).block(3)
    assert (block.wire == 1).all()
    assert block.first == pytest.approx(block.last)
    seconds = step_seconds(world.costs(OPTIONS), link, block)
    assert np.ptp(seconds, axis=1) == pytest.approx(0, abs=1e-12)
    assert seconds[:, 0] == pytest.approx(world.seconds(world.costs(OPTIONS), link), rel=1e-12)


def test_randomness_does_not_depend_on_the_order_of_questions() -> None:
    world = World(make_job("cnn"), 8)
    one, other = Weather(world, Noise(), 5), Weather(world, Noise(), 5)
    late = one.block(7)
    assert (other.block(2).wire == one.block(2).wire).all()
    assert (late.last == other.block(7).last).all()
    assert (late.last != one.block(2).last).any()
    cut = part(late, 3, 10)
    assert (cut.wire == late.wire[3:10]).all()


def test_more_ranks_wait_longer_for_the_slowest() -> None:
    job = make_job("resnet50")
    last = [Weather(World(job, n), Noise(), 0).block(0).last[:, -1].mean() for n in (2, 64, 4096)]
    assert last == sorted(last)
    assert last[-1] > 1.05 * last[0]


def test_a_thousand_ranks_take_seconds() -> None:
    world = World(make_job("transformer"), 1024)
    begun = time.process_time()
    weather = Weather(world, Noise(), 0)
    costs, link = world.costs(OPTIONS), Link.of(0.1, 10)
    for number in range(2000 // BLOCK):
        run_steps(costs, np.zeros(14, dtype=np.intp), link, weather.block(number))
    assert time.process_time() - begun < 8

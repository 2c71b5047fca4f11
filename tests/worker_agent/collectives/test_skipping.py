"""What a driver asks of schedules, and what it owes a request afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradpilot.errors import UnknownNameError
from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import SCHEDULES, AllReduce, Schedule, slice_bounds
from gradpilot.worker_agent.collectives.reduction import MAX, Reduction
from gradpilot.worker_agent.collectives.ring import ring
from gradpilot.worker_agent.collectives.skipping import (
    MIN_SKIP_ELEMENTS,
    backend_carries,
    min_skip_elements,
    omitted_parts,
    schedule_for,
    settle,
)
from gradpilot.worker_agent.compressors.base import At
from gradpilot.worker_agent.testing import average, relative_error
from gradpilot.worker_agent.virtual import virtual_step

RANDOM = Option(collective="ring", skip=1)
STATIC = Option(collective="ring", skip=1, rotation="static")


def planned(option: Option, numel: int = 10_000, world_size: int = 4, **at: object) -> Schedule:
    place = At(1, world_size, **{"step": 3, "bucket": "b", **at})  # type: ignore[arg-type]
    return schedule_for(option, place, AllReduce(torch.zeros(numel)))


def test_small_and_unskippable_payloads_run_all_steps() -> None:
    assert planned(RANDOM, MIN_SKIP_ELEMENTS).omitted
    assert not planned(RANDOM, MIN_SKIP_ELEMENTS - 1).omitted
    assert not planned(RANDOM, 64 * 63 - 1, world_size=64).omitted
    assert planned(RANDOM, 64 * 63, world_size=64).omitted
    at = At(1, 4, 3)
    assert not schedule_for(RANDOM, at, AllReduce(torch.zeros(10_000), skippable=False)).omitted


@pytest.mark.parametrize("world_size", [2, 3, 7, 33, 64, 100])
def test_no_slice_is_empty_from_the_floor_on(world_size: int) -> None:
    floor = min_skip_elements(world_size)
    for numel in range(floor, floor + 2 * world_size):
        bounds = slice_bounds(numel, world_size)
        assert all(b.start < b.stop for b in bounds), numel


def test_static_rotation_never_moves() -> None:
    assert {planned(STATIC, step=step).omitted for step in range(20)} == {(0,)}


@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        ("ring", {(0,), (1,), (2,), (3,)}),
        ("halving_doubling", {(0, 1), (2, 3)}),
        ("tree", {(0, 1), (2, 3)}),
    ],
)
def test_random_rotation_moves_with_step_bucket_and_seed(
    collective: str, expected: set[tuple[int, ...]]
) -> None:
    option = Option(collective=collective, skip=1)
    for name, values in (("step", range(40)), ("bucket", "abcdefghijklmnop"), ("seed", range(40))):
        seen = {planned(option, **{name: value}).omitted for value in values}  # type: ignore[arg-type]
        assert seen == expected, name


def test_random_rotation_is_alike_on_all_ranks() -> None:
    request = AllReduce(torch.zeros(10_000))
    for step in range(10):
        omitted = [schedule_for(RANDOM, At(r, 4, step), request).omitted[0] for r in range(4)]
        assert sorted(omitted) == [0, 1, 2, 3]


def test_the_option_names_who_carries_it() -> None:
    sum_, odd = AllReduce(torch.zeros(4)), AllReduce(torch.zeros(4))
    odd.reduction = Reduction("odd", Tensor.mul_, native=False)
    greatest = AllReduce(torch.zeros(4), reduction=MAX)
    for carrier in ("native", "allgather", "alltoall", "hierarchical"):
        option = Option(collective=carrier)
        assert backend_carries(option, sum_)
        assert backend_carries(option, greatest)
        assert not backend_carries(option, odd)
        assert schedule_for(option, At(1, 4, 0), odd) == ring(1, 4)
    for name in SCHEDULES:
        option = Option(collective=name)
        assert not backend_carries(option, sum_)
        assert schedule_for(option, At(1, 4, 0), sum_) == SCHEDULES.get(name).build(1, 4)
    with pytest.raises(UnknownNameError, match="unknown collective 'tee'"):
        backend_carries(Option(collective="tee"), sum_)


def test_omitted_parts_are_ascending_and_leave_out_empty_slices() -> None:
    schedule = ring(0, 4, skip=3)
    assert schedule.omitted == (3, 2, 1)
    assert omitted_parts(schedule, 8) == (slice(2, 4), slice(4, 6), slice(6, 8))
    assert omitted_parts(schedule, 5) == (slice(2, 4), slice(4, 5))


def test_divisor_drop_scales_and_feedback_tells() -> None:
    request = AllReduce(torch.ones(10_000))
    option = Option(collective="ring", skip=1, divisor="drop", skip_feedback=True)
    reply = settle(option, At(0, 4, 0), ring(0, 4, skip=1), request)
    assert torch.equal(reply, torch.full((10_000,), 4 / 3))
    assert request.omitted == (slice(7500, 10_000),)
    spared = AllReduce(torch.ones(10))
    assert settle(option, At(0, 4, 0), ring(0, 4), spared).tolist() == [1.0] * 10
    assert spared.omitted == ()


def test_divisor_shrink_scales_what_drop_would_give() -> None:
    request = AllReduce(torch.ones(8))
    option = Option(collective="ring", skip=2, divisor="shrink", shrink=0.75)
    reply = settle(option, At(0, 4, 0), ring(0, 4, skip=2), request)
    assert reply.tolist() == [1.5] * 8
    assert request.omitted == ()
    untouched = settle(option, At(0, 4, 0), ring(0, 4), AllReduce(torch.ones(8)))
    assert untouched.tolist() == [1.0] * 8


def vnmse(grads: list[Tensor], skip: int, divisor: str) -> float:
    option = Option(collective="ring", skip=skip, divisor=divisor)
    mean = virtual_step(option, grads).mean
    return relative_error(mean, average(grads)) ** 2


def test_skip_and_drop_cross_where_theory_says() -> None:
    # N = 8, S = 4: equal error to the mean at SNR 1 / (N - S) = .25.
    generator = torch.Generator().manual_seed(0)
    mu = torch.randn(100_000, generator=generator)
    noise = [torch.randn(100_000, generator=generator) for _ in range(8)]

    def errors(snr: float) -> tuple[float, float]:
        grads = [snr**0.5 * mu + e for e in noise]
        return vnmse(grads, 4, "skip"), vnmse(grads, 4, "drop")

    skip, drop = errors(0.25)
    assert skip == pytest.approx(drop, rel=0.02)
    skip, drop = errors(0.2)
    assert skip < drop
    skip, drop = errors(0.3)
    assert skip > drop

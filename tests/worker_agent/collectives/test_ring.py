from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import (
    SCHEDULES,
    AllReduce,
    Schedule,
    Step,
    slice_bounds,
)
from gradpilot.worker_agent.collectives.ring import ring
from gradpilot.worker_agent.collectives.skipping import (
    MIN_SKIP_ELEMENTS,
    min_skip_elements,
    omitted_parts,
    schedule_for,
    settle,
)
from gradpilot.worker_agent.compressors.base import At
from gradpilot.worker_agent.testing import average, gradients, relative_error, same_bits
from gradpilot.worker_agent.virtual import run_schedules, virtual_step

GRID = [
    (n, skip, shift)
    for n in (1, 2, 3, 4, 5, 8)
    for skip in range(n)
    for shift in sorted({0, 1 % n, n - 1})
]


def schedules(world_size: int, skip: int = 0, shift: int = 0) -> list[Schedule]:
    return [ring(r, world_size, skip=skip, shift=shift) for r in range(world_size)]


def reduced(payloads: list[Tensor], skip: int = 0, shift: int = 0) -> list[Tensor]:
    out = [p.clone() for p in payloads]
    run_schedules(out, schedules(len(payloads), skip, shift))
    return out


def textbook_ring(payloads: list[Tensor]) -> Tensor:
    """Sum as a plain ring does: slice c starts on rank c + 1 and ends on rank c."""
    world_size = len(payloads)
    total = torch.empty_like(payloads[0])
    for c, part in enumerate(slice_bounds(total.numel(), world_size)):
        partial = payloads[(c + 1) % world_size][part].clone()
        for j in range(2, world_size + 1):
            partial += payloads[(c + j) % world_size][part]
        total[part] = partial
    return total


@settings(deadline=None, max_examples=100)
@given(
    world_size=st.integers(1, 12),
    skip=st.integers(0, 12),
    shift=st.integers(0, 11),
    numel=st.integers(1, 100),
)
def test_equals_all_reduce_of_masked_payloads(
    world_size: int, skip: int, shift: int, numel: int
) -> None:
    generator = torch.Generator().manual_seed(numel)
    # Whole numbers: sums are exact in any order.
    payloads = list(torch.randint(-99, 99, (world_size, numel), generator=generator).float())
    masked = torch.stack(payloads)
    for rank, schedule in enumerate(schedules(world_size, skip, shift)):
        for part in omitted_parts(schedule, numel):
            masked[rank, part] = 0.0
    for result in reduced(payloads, skip, shift):
        assert torch.equal(result, masked.sum(0))


@pytest.mark.parametrize("skip", range(8))
def test_all_ranks_end_with_the_same_bits(skip: int) -> None:
    out = reduced(gradients(1001, 8), skip, shift=3)
    assert all(same_bits(o, out[0]) for o in out)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_without_skip_it_is_the_plain_ring(world_size: int) -> None:
    payloads = gradients(1001, world_size)
    assert same_bits(reduced(payloads)[0], textbook_ring(payloads))


@pytest.mark.parametrize(("world_size", "skip", "shift"), GRID)
def test_contributions_and_omissions(world_size: int, skip: int, shift: int) -> None:
    made = schedules(world_size, skip, shift)
    assert {s.contributions for s in made} == {world_size - skip}
    assert all(len(set(s.omitted)) == skip for s in made)
    omitted = Counter(number for s in made for number in s.omitted)
    assert all(omitted[c] == skip for c in range(world_size))
    # Counted on the data itself: who is in the sum of each slice.
    who = reduced([torch.full((world_size,), 2.0**r) for r in range(world_size)], skip, shift)[0]
    for c in range(world_size):
        expected = sum(2**r for r, s in enumerate(made) if c not in s.omitted)
        assert int(who[c]) == expected


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_all_shifts_together_omit_every_pair_equally(world_size: int) -> None:
    for skip in range(world_size):
        pairs = Counter(
            (rank, number)
            for shift in range(world_size)
            for rank, s in enumerate(schedules(world_size, skip, shift))
            for number in s.omitted
        )
        assert all(pairs[r, c] == skip for r in range(world_size) for c in range(world_size))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_average_over_all_shifts_is_the_shrunken_mean(world_size: int) -> None:
    payloads = [p.double() / world_size for p in gradients(240, world_size)]
    for skip in range(world_size):
        means = [reduced(payloads, skip, shift)[0] for shift in range(world_size)]
        expected = average(payloads) * (world_size - skip)
        assert relative_error(average(means), expected) < 1e-15


@pytest.mark.parametrize(("world_size", "skip", "shift"), GRID)
def test_steps_and_bytes(world_size: int, skip: int, shift: int) -> None:
    made = schedules(world_size, skip, shift)
    assert all(len(s.steps) == 2 * (world_size - 1) - skip for s in made)
    assert all(sum(step.accumulate for step in s.steps) == world_size - 1 - skip for s in made)
    numel = 24 * world_size - 5  # the last slice is shorter
    bounds = slice_bounds(numel, world_size)
    length = bounds[0].stop
    for s in made:
        sent = sum(bounds[step.send].stop - bounds[step.send].start for step in s.steps)
        # Every slice once less at most: those sent are of full length but for the last slice.
        padded = len(s.steps) * length
        assert padded - 2 * 5 <= sent <= padded


def test_fewer_steps_bound_the_speed_up() -> None:
    for skip, expected in enumerate((1.0, 1.077, 1.167, 1.273, 1.400, 1.556, 1.750, 2.000)):
        full, fewer = ring(0, 8), ring(0, 8, skip=skip)
        assert len(full.steps) / len(fewer.steps) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(("world_size", "skip", "shift"), GRID)
def test_ranks_expect_what_their_neighbours_send(world_size: int, skip: int, shift: int) -> None:
    made = schedules(world_size, skip, shift)
    for steps in zip(*(s.steps for s in made), strict=True):
        for rank, step in enumerate(steps):
            assert step.to == (rank + 1) % world_size
            assert steps[step.source].to == rank
            assert steps[step.source].send == step.receive


def test_first_messages_of_a_known_case() -> None:
    # N = 4, S = 1: rank 0 starts with its own slice -2 = 2 and omits slice -1 = 3.
    schedule = ring(0, 4, skip=1)
    assert schedule.steps[0] == Step(to=1, send=2, source=3, receive=1, accumulate=True)
    assert schedule.omitted == (3,)


def test_skip_is_clamped() -> None:
    assert ring(2, 4, skip=9) == ring(2, 4, skip=3)
    assert ring(2, 4, skip=-1) == ring(2, 4)
    assert ring(0, 1, skip=3) == Schedule(slices=1, steps=(), omitted=(), contributions=1)
    assert SCHEDULES.get("ring") is ring


# --- what the driver asks for ------------------------------------------------------------------


def planned(option: Option, numel: int = 10_000, world_size: int = 4, **at: object) -> Schedule:
    place = At(1, world_size, **{"step": 3, "bucket": "b", **at})  # type: ignore[arg-type]
    return schedule_for(option, place, AllReduce(torch.zeros(numel)))


RANDOM = Option(collective="ring", skip=1)
STATIC = Option(collective="ring", skip=1, rotation="static")


def test_small_and_unskippable_payloads_run_all_steps() -> None:
    assert planned(RANDOM, MIN_SKIP_ELEMENTS).omitted
    assert not planned(RANDOM, MIN_SKIP_ELEMENTS - 1).omitted
    assert not planned(RANDOM, 64 * 63 - 1, world_size=64).omitted
    assert planned(RANDOM, 64 * 63, world_size=64).omitted
    at = At(1, 4, 3)
    assert not schedule_for(RANDOM, at, AllReduce(torch.zeros(10_000), skippable=False)).omitted


@pytest.mark.parametrize("world_size", [2, 3, 7, 33, 64, 100])
def test_every_rank_contributes_something_from_the_floor_on(world_size: int) -> None:
    floor = min_skip_elements(world_size)
    for numel in range(floor, floor + 2 * world_size):
        bounds = slice_bounds(numel, world_size)
        assert all(b.start < b.stop for b in bounds), numel


def test_static_rotation_never_moves() -> None:
    assert {planned(STATIC, step=step).omitted for step in range(20)} == {(0,)}


def test_random_rotation_moves_with_step_bucket_and_seed_alike_on_all_ranks() -> None:
    for name, values in (("step", range(40)), ("bucket", "abcdefghijklmnop"), ("seed", range(40))):
        seen = {planned(RANDOM, **{name: value}).omitted for value in values}  # type: ignore[arg-type]
        assert seen == {(0,), (1,), (2,), (3,)}, name
    request = AllReduce(torch.zeros(10_000))
    for step in range(10):
        omitted = [schedule_for(RANDOM, At(r, 4, step), request).omitted[0] for r in range(4)]
        assert sorted(omitted) == [0, 1, 2, 3]


def test_divisor_drop_scales_and_feedback_tells() -> None:
    request = AllReduce(torch.ones(10_000))
    option = Option(collective="ring", skip=1, divisor="drop", skip_feedback=True)
    reply = settle(option, At(0, 4, 0), ring(0, 4, skip=1), request)
    assert torch.equal(reply, torch.full((10_000,), 4 / 3))
    assert request.omitted == (slice(7500, 10_000),)
    spared = AllReduce(torch.ones(10))
    assert settle(option, At(0, 4, 0), ring(0, 4), spared).tolist() == [1.0] * 10
    assert spared.omitted == ()


def vnmse(grads: list[Tensor], skip: int, divisor: str) -> float:
    option = Option(collective="ring", skip=skip, divisor=divisor)
    mean = virtual_step(option, grads).mean
    return relative_error(mean, average(grads)) ** 2


@pytest.mark.parametrize("skip", [1, 2, 4, 6])
def test_error_against_theory(skip: int) -> None:
    generator = torch.Generator().manual_seed(0)
    independent = [torch.randn(50_000, generator=generator) for _ in range(8)]
    identical = [independent[0]] * 8
    assert vnmse(independent, skip, "skip") == pytest.approx(skip / 8, rel=0.02)
    assert vnmse(independent, skip, "drop") == pytest.approx(skip / (8 - skip), rel=0.02)
    assert vnmse(identical, skip, "skip") == pytest.approx((skip / 8) ** 2, rel=0.02)
    assert vnmse(identical, skip, "drop") == pytest.approx(0.0, abs=1e-12)


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

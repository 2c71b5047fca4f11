from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.protos.messages import DENSE
from gradpilot.worker_agent.collectives.base import SCHEDULES, AllReduce, slice_bounds
from gradpilot.worker_agent.collectives.reduction import Reduction
from gradpilot.worker_agent.collectives.saturating import (
    SATURATING_INT8,
    SATURATING_NIBBLES,
    pack_nibbles,
    unpack_nibbles,
)
from gradpilot.worker_agent.collectives.skipping import backend_carries
from gradpilot.worker_agent.virtual import run_schedules


def packed(codes: Tensor) -> Tensor:
    out = torch.empty(codes.numel() // 2, dtype=torch.int8)
    return pack_nibbles(codes.clone(), out=out)


def unpacked(payload: Tensor) -> Tensor:
    return unpack_nibbles(payload, out=torch.empty(payload.numel() * 2, dtype=torch.int8))


def pairs(limit: int) -> tuple[Tensor, Tensor]:
    """Return all pairs of codes."""
    codes = torch.arange(-limit, limit + 1, dtype=torch.int8)
    first, second = torch.cartesian_prod(codes, codes).unbind(1)
    return first.contiguous(), second.contiguous()


def test_int8_sums_stop_at_127() -> None:
    first, second = pairs(127)
    expected = (first.int() + second.int()).clamp(-127, 127)
    target = first.clone()
    assert SATURATING_INT8.combine_(target, second) is target
    assert torch.equal(target.int(), expected)


def test_nibble_sums_stop_at_7_in_each_half_of_a_byte() -> None:
    first, second = pairs(7)
    expected = (first.int() + second.int()).clamp(-7, 7)
    # Every pair in one half beside every other pair in the other half.
    count = len(first)
    low, high = torch.cartesian_prod(torch.arange(count), torch.arange(count)).unbind(1)
    places = torch.cat([low, high])
    target = packed(first[places])
    assert SATURATING_NIBBLES.combine_(target, packed(second[places])) is target
    assert torch.equal(unpacked(target).int(), expected[places])


def test_packing_keeps_every_code() -> None:
    codes = torch.cartesian_prod(*[torch.arange(-8, 8, dtype=torch.int8)] * 2).t().reshape(-1)
    assert torch.equal(unpacked(packed(codes)), codes)
    # Zeros pack to zeros: what a rank leaves out of a sum is what it does not add.
    assert not packed(torch.zeros(8, dtype=torch.int8)).any()


@given(st.lists(st.integers(-7, 7), min_size=2, max_size=40), st.integers(0, 40), st.data())
@settings(deadline=None, max_examples=40)
def test_any_part_may_be_combined_by_itself(
    codes: list[int], cut: int, data: st.DataObject
) -> None:
    other = data.draw(st.lists(st.integers(-7, 7), min_size=len(codes), max_size=len(codes)))
    even = len(codes) // 2 * 2
    first, second = (torch.tensor(c[:even], dtype=torch.int8) for c in (codes, other))
    for reduction, a, b in (
        (SATURATING_INT8, first.mul(18), second.mul(18)),
        (SATURATING_NIBBLES, packed(first), packed(second)),
    ):
        whole, parts = a.clone(), a.clone()
        reduction.combine_(whole, b)
        reduction.combine_(parts[:cut], b[:cut])
        reduction.combine_(parts[cut:], b[cut:])
        assert torch.equal(whole, parts)


@pytest.mark.parametrize("reduction", [SATURATING_INT8, SATURATING_NIBBLES])
def test_the_backend_is_not_asked(reduction: Reduction) -> None:
    request = AllReduce(torch.zeros(4, dtype=torch.int8), reduction=reduction)
    assert not backend_carries(DENSE, request)


def ring_sum(payloads: list[Tensor], reduction: Reduction) -> Tensor:
    """Return what a ring makes of the payloads, the same on all ranks."""
    held = [p.clone() for p in payloads]
    ring = SCHEDULES.get("ring").build
    run_schedules(held, [ring(r, len(held)) for r in range(len(held))], reduction)
    assert all(torch.equal(h, held[0]) for h in held)
    return held[0]


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_a_ring_adds_slice_c_from_rank_c_plus_1_around_to_rank_c(world_size: int) -> None:
    generator = torch.Generator().manual_seed(world_size)
    payloads = [
        torch.randint(-127, 128, (101,), generator=generator).to(torch.int8)
        for _ in range(world_size)
    ]
    total = ring_sum(payloads, SATURATING_INT8)
    saturated = 0
    for c, part in enumerate(slice_bounds(101, world_size)):
        expected = payloads[(c + 1) % world_size][part].int()
        for hop in range(2, world_size + 1):
            expected = (expected + payloads[(c + hop) % world_size][part]).clamp(-127, 127)
        assert torch.equal(total[part].int(), expected)
        saturated += int((expected.abs() == 127).sum())
    assert saturated > 0


def test_the_order_matters_only_where_a_sum_saturates() -> None:
    first, second, third = (torch.tensor([v], dtype=torch.int8) for v in (100, 100, -100))
    one_way = SATURATING_INT8.combine_(SATURATING_INT8.combine_(first.clone(), second), third)
    other_way = SATURATING_INT8.combine_(SATURATING_INT8.combine_(first.clone(), third), second)
    assert (one_way.item(), other_way.item()) == (27, 100)


@pytest.mark.parametrize("schedule", ["ring", "tree", "halving_doubling"])
def test_without_saturation_it_is_the_plain_sum(schedule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randint(-1, 2, (64,), generator=generator).to(torch.int8) for _ in range(7)]
    total = torch.stack(codes).sum(0).to(torch.int8)
    build = SCHEDULES.get(schedule).build
    for reduction, payloads in (
        (SATURATING_INT8, [c.clone() for c in codes]),
        (SATURATING_NIBBLES, [packed(c) for c in codes]),
    ):
        run_schedules(payloads, [build(r, 7) for r in range(7)], reduction)
        for payload in payloads:
            got = unpacked(payload) if reduction is SATURATING_NIBBLES else payload
            assert torch.equal(got, total)

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gradpilot.worker_agent.collectives.base import SCHEDULES, Step, slice_bounds
from gradpilot.worker_agent.collectives.halving_doubling import halving_doubling, most_skipped
from gradpilot.worker_agent.collectives.reduction import Reduction
from gradpilot.worker_agent.testing import gradients, same_bits
from gradpilot.worker_agent.testing_collectives import ScheduleConformance

Ranks = list[list[Tensor]]
"""Slices by rank."""


def core(world_size: int) -> int:
    """Return the largest power of two up to N."""
    return 1 << int(math.log2(world_size))


class TestHalvingDoubling(ScheduleConformance):
    name = "halving_doubling"

    def contributions(self, world_size: int, skip: int) -> int:
        return world_size >> skip

    def steps(self, world_size: int, skip: int) -> tuple[int, int]:
        levels = int(math.log2(world_size))
        fold = int(core(world_size) < world_size)
        return levels - skip + fold, levels + fold

    def sent(self, rank: int, world_size: int, skip: int) -> Fraction:
        extras = world_size - core(world_size)
        if rank >= core(world_size):
            return Fraction(1)
        halving = Fraction(1, 2**skip) - Fraction(1, core(world_size))
        doubling = 1 - Fraction(1, core(world_size))
        return halving + doubling + int(rank < extras)

    def textbook(self, payloads: Sequence[Tensor], reduction: Reduction) -> Tensor:
        """Fold, then halve: the lower half of the ranks keeps the lower half of the slices."""
        half = core(len(payloads))
        ranks = list(payloads[:half])
        for own, incoming in zip(ranks, payloads[half:], strict=False):
            reduction.combine_(own, incoming)
        bounds = slice_bounds(ranks[0].numel(), half)

        def added(own: Ranks, peers: Ranks, kept: slice) -> Ranks:
            return [
                [reduction.combine_(a.clone(), b) for a, b in zip(o[kept], p[kept], strict=True)]
                for o, p in zip(own, peers, strict=True)
            ]

        def halve(ranks: Ranks) -> list[Tensor]:
            if len(ranks) == 1:
                return ranks[0]
            lower, upper = slice(len(ranks) // 2), slice(len(ranks) // 2, None)
            below, above = ranks[lower], ranks[upper]
            return [*halve(added(below, above, lower)), *halve(added(above, below, upper))]

        return torch.cat(halve([[rank[part] for part in bounds] for rank in ranks]))

    def test_a_slice_hears_the_labels_that_share_its_high_bits(
        self, world_size: int, skip: int
    ) -> None:
        low = most_skipped(world_size) - skip
        for shift in range(world_size):
            for rank, schedule in enumerate(self.made(world_size, skip, shift)):
                heard = set(range(schedule.slices)) - set(schedule.omitted)
                if skip:
                    assert heard == {
                        c for c in range(world_size) if c >> low == (rank ^ shift) >> low
                    }
                else:
                    assert len(heard) == schedule.slices

    def test_messages_are_one_piece(self, world_size: int, skip: int) -> None:
        # So that nothing needs to be copied together before it is sent.
        for schedule in self.made(world_size, skip, shift=world_size - 1):
            for step in schedule.steps:
                for numbers in filter(None, (step.send, step.receive)):
                    assert list(numbers) == list(range(numbers[0], numbers[-1] + 1))


@pytest.mark.parametrize(("skip", "eighths"), [(0, 7), (1, 3), (2, 1), (3, 0)])
def test_bytes_while_halving_at_eight_ranks(skip: int, eighths: int) -> None:
    for rank in range(8):
        schedule = halving_doubling(rank, 8, skip=skip, shift=5)
        sent = sum(len(step.send) for step in schedule.steps if step.accumulate)
        assert sent == eighths
        assert schedule.contributions == (8, 4, 2, 1)[skip]


def test_messages_of_a_known_case() -> None:
    # N = 4, j = 1, shift 1: rank 2 speaks for label 3, which keeps 2 and 3 and never hears 0 and 1.
    schedule = halving_doubling(2, 4, skip=1, shift=1)
    assert schedule.steps == (
        Step(to=3, send=(2,), source=3, receive=(3,), accumulate=True),
        Step(to=3, send=(3,), source=3, receive=(2,), accumulate=False),
        Step(to=0, send=(2, 3), source=0, receive=(0, 1), accumulate=False),
    )
    assert schedule.omitted == (0, 1)


def test_an_extra_rank_talks_to_its_partner_only() -> None:
    whole = (0, 1, 2, 3)
    schedule = halving_doubling(4, 5)
    assert schedule.steps[0] == Step(to=0, send=whole, source=0, receive=(), accumulate=True)
    assert schedule.steps[-1] == Step(to=0, send=(), source=0, receive=whole, accumulate=False)
    assert not any(step.send or step.receive for step in schedule.steps[1:-1])
    for rank in (1, 2, 3):
        schedule = halving_doubling(rank, 5)
        assert not any(schedule.steps[i].send or schedule.steps[i].receive for i in (0, -1))


def test_only_powers_of_two_can_skip() -> None:
    assert [most_skipped(n) for n in range(1, 18)] == [
        0, 1, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4, 0,
    ]  # fmt: skip
    assert halving_doubling(3, 6, skip=2, shift=5) == halving_doubling(3, 6)
    assert SCHEDULES.get("halving_doubling").build is halving_doubling


def test_a_shift_without_skip_moves_no_bit_of_the_result() -> None:
    # XOR keeps pairs together, so only the order within a pair could differ.
    suite = TestHalvingDoubling()
    payloads = gradients(1001, 8)
    expected = suite.reduced(payloads)[0]
    for shift in range(8):
        assert same_bits(suite.reduced(payloads, shift=shift)[0], expected)

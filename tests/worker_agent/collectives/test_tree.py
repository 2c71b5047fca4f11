from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gradpilot.worker_agent.collectives.base import SCHEDULES, Step, slice_bounds
from gradpilot.worker_agent.collectives.reduction import Reduction
from gradpilot.worker_agent.collectives.tree import most_skipped, tree
from gradpilot.worker_agent.testing_collectives import ScheduleConformance


def roots(world_size: int) -> list[int]:
    """Return the root of every slice: positions in the order of their mirrored bits."""
    width = world_size.bit_length()
    return sorted(range(world_size), key=lambda c: f"{c:0{width}b}"[::-1])


class TestTree(ScheduleConformance):
    name = "tree"

    def contributions(self, world_size: int, skip: int) -> int:
        return math.ceil(world_size / (1 << skip))

    def steps(self, world_size: int, skip: int) -> tuple[int, int]:
        levels = math.ceil(math.log2(world_size))
        return levels - skip, levels

    def sent(self, rank: int, world_size: int, skip: int) -> Fraction:
        # All but the root pass a sum up, all but the root are passed one: N trees, N ranks, 1 each.
        return Fraction(self.contributions(world_size, skip) - 1 + world_size - 1, world_size)

    def textbook(self, payloads: Sequence[Tensor], reduction: Reduction) -> Tensor:
        """Whoever is next to the root is odd; on each level the odd ones add to the even ones."""
        world_size = len(payloads)
        total = torch.empty_like(payloads[0])
        for root, part in zip(
            roots(world_size), slice_bounds(total.numel(), world_size), strict=True
        ):
            level = [payloads[(root + w) % world_size][part] for w in range(world_size)]
            while len(level) > 1:
                even, odd = level[::2], level[1::2]
                for own, incoming in zip(even, odd, strict=False):
                    reduction.combine_(own, incoming)
                level = even
            total[part] = level[0]
        return total

    def test_peers_depend_on_the_level_alone(self, world_size: int, skip: int) -> None:
        levels = math.ceil(math.log2(world_size))
        distances = [*range(skip, levels), *reversed(range(levels))]
        for shift in range(world_size):
            for rank, schedule in enumerate(self.made(world_size, skip, shift)):
                for step, level in zip(schedule.steps, distances, strict=True):
                    below, above = (rank - 2**level) % world_size, (rank + 2**level) % world_size
                    ends = (below, above) if step.accumulate else (above, below)
                    assert (step.to, step.source) == ends

    def test_multiples_of_two_to_the_skip_contribute(self, world_size: int, skip: int) -> None:
        for shift in range(world_size):
            for rank, schedule in enumerate(self.made(world_size, skip, shift)):
                for number, root in enumerate(roots(world_size)):
                    label = (rank + shift - root) % world_size
                    assert (number in schedule.omitted) == (label % 2**skip != 0)

    def test_every_rank_is_the_root_of_one_slice(self, world_size: int, skip: int) -> None:
        # A root never sends its slice up.
        for shift in range(world_size):
            for rank, schedule in enumerate(self.made(world_size, skip, shift)):
                up = {c for step in schedule.steps if step.accumulate for c in step.send}
                (own,) = set(range(world_size)) - up - set(schedule.omitted)
                assert roots(world_size)[own] == (rank + shift) % world_size

    def test_messages_are_one_piece_for_powers_of_two(self, world_size: int, skip: int) -> None:
        # So that nothing needs to be copied together before it is sent.
        pieces = 0
        for shift in range(world_size):
            for schedule in self.made(world_size, skip, shift):
                for step in schedule.steps:
                    joints = sum(b - a > 1 for a, b in itertools.pairwise(step.send))
                    pieces = max(pieces, 1 + joints)
        assert pieces <= (1 if world_size in (1, 2, 4, 8) else 2)


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 8, 13, 64])
def test_moves_as_much_as_a_reduce_scatter_in_fewer_steps(world_size: int) -> None:
    for rank in range(world_size):
        reducing = [step for step in tree(rank, world_size).steps if step.accumulate]
        assert len(reducing) == math.ceil(math.log2(world_size))
        assert sum(len(step.send) for step in reducing) == world_size - 1


def test_messages_of_a_known_case() -> None:
    # N = 3: slices 0, 1, 2 have their roots at 0, 2, 1; rank 1 has the labels 1, 2, 0 for them.
    assert tree(1, 3).steps == (
        Step(to=0, send=(0,), source=2, receive=(2,), accumulate=True),
        Step(to=2, send=(1,), source=0, receive=(2,), accumulate=True),
        Step(to=0, send=(2,), source=2, receive=(1,), accumulate=False),
        Step(to=2, send=(2,), source=0, receive=(0,), accumulate=False),
    )
    pruned = tree(1, 3, skip=1)
    assert pruned.steps == tree(1, 3).steps[1:]
    assert pruned.omitted == (0,)
    assert pruned.contributions == 2


def test_most_skipped() -> None:
    assert [most_skipped(n) for n in range(1, 18)] == [
        0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5,
    ]  # fmt: skip
    assert SCHEDULES.get("tree").build is tree

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from gradpilot.worker_agent.collectives.base import SCHEDULES, Step, slice_bounds
from gradpilot.worker_agent.collectives.reduction import Reduction
from gradpilot.worker_agent.collectives.ring import ring
from gradpilot.worker_agent.testing_collectives import ScheduleConformance


class TestRing(ScheduleConformance):
    name = "ring"

    def contributions(self, world_size: int, skip: int) -> int:
        return world_size - skip

    def steps(self, world_size: int, skip: int) -> tuple[int, int]:
        return world_size - 1 - skip, world_size - 1

    def sent(self, rank: int, world_size: int, skip: int) -> Fraction:
        return Fraction(2 * (world_size - 1) - skip, world_size)

    def textbook(self, payloads: Sequence[Tensor], reduction: Reduction) -> Tensor:
        """Slice c starts on rank c + 1 and ends on rank c."""
        world_size = len(payloads)
        total = torch.empty_like(payloads[0])
        for c, part in enumerate(slice_bounds(total.numel(), world_size)):
            partial = payloads[(c + 1) % world_size][part]
            for j in range(2, world_size + 1):
                own = payloads[(c + j) % world_size][part].clone()
                partial = reduction.combine_(own, partial)
            total[part] = partial
        return total

    def test_peers_are_the_neighbours(self, world_size: int, skip: int) -> None:
        for rank, schedule in enumerate(self.made(world_size, skip, shift=1)):
            peers = {(step.to, step.source) for step in schedule.steps}
            assert peers <= {((rank + 1) % world_size, (rank - 1) % world_size)}


def test_fewer_steps_bound_the_speed_up() -> None:
    for skip, expected in enumerate((1.0, 1.077, 1.167, 1.273, 1.400, 1.556, 1.750, 2.000)):
        full, fewer = ring(0, 8), ring(0, 8, skip=skip)
        assert len(full.steps) / len(fewer.steps) == pytest.approx(expected, abs=5e-4)


def test_first_messages_of_a_known_case() -> None:
    # N = 4, S = 1: rank 0 starts with its own slice -2 = 2 and omits slice -1 = 3.
    schedule = ring(0, 4, skip=1)
    assert schedule.steps[0] == Step(to=1, send=(2,), source=3, receive=(1,), accumulate=True)
    assert schedule.omitted == (3,)


def test_it_is_what_the_registry_knows() -> None:
    assert SCHEDULES.get("ring").build is ring
    assert SCHEDULES.get("ring").most_skipped(8) == 7

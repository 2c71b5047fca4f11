"""Whose top-k serves all: ranks in turn, or the loudest while one rank outdoes the others.

Pure functions of what all ranks know alike, so that all ranks come to the same answer.

When following pays was measured on heavy-tailed gradients of 4 and 8 ranks that share half, one of
them scaled, at a ratio of 0.01 with error feedback over 60 steps. Up to a skew of 4 taking turns
brings more of the mean gradient through (at a skew of 2.7 by a tenth): whoever is followed has
served its large elements already, while the others' wait. At a skew of 9 following brings more, by
5 to 20 %.

Letters: N world size, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SKEW_TO_FOLLOW = 8.0
"""Skew from which on the loudest rank is followed."""

SKEW_TO_TAKE_TURNS = 6.0
"""Skew below which ranks take turns again; lower, so that noise does not switch to and fro."""

MOST_TURNS_MISSED = 4
"""A rank that was not the source for this many times N steps is the next one, loud or not."""

_WEIGHT = 0.1  # of the newest energies in the running shares


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of the ranks; the same on all of them.

    Attributes:
        shares: Running mean of each rank's share in the energy of all gradients; they sum to 1.
        ages: Steps since the last one in which each rank was the source: how stale its own large
            elements may be. At most N - 1 while ranks take turns.
        following: Whether the loudest rank is followed.
    """

    shares: tuple[float, ...]
    ages: tuple[int, ...]
    following: bool

    @property
    def skew(self) -> float:
        """Return the energy of the loudest rank over the mean of the others', at least 1."""
        if len(self.shares) == 1:
            return 1.0
        loudest = max(self.shares)
        others = (sum(self.shares) - loudest) / (len(self.shares) - 1)
        return loudest / others if others > 0.0 else float("inf")


def first_standing(world_size: int) -> Standing:
    """Return the standing before the first step: all alike, none stale."""
    return Standing((1.0 / world_size,) * world_size, (0,) * world_size, following=False)


def next_source(standing: Standing, norms: Sequence[float], step: int) -> tuple[int, Standing]:
    """Return the source of this step and the standing after it.

    Args:
        standing: After the step before.
        norms: Norm of every rank's gradient in this step.
        step: Number of the step.
    """
    world_size = len(norms)
    # Relative to the greatest, so that no square overflows.
    peak = max(norms)
    energies = [(norm / peak) ** 2 if peak > 0.0 else 1.0 for norm in norms]
    total = sum(energies)
    shares = tuple(
        (1.0 - _WEIGHT) * share + _WEIGHT * energy / total
        for share, energy in zip(standing.shares, energies, strict=True)
    )
    seen = Standing(shares, standing.ages, standing.following)
    following = seen.skew >= (SKEW_TO_TAKE_TURNS if standing.following else SKEW_TO_FOLLOW)

    oldest = max(standing.ages)
    if not following:
        source = step % world_size
    elif oldest >= MOST_TURNS_MISSED * world_size:
        source = standing.ages.index(oldest)
    else:
        source = max(range(world_size), key=energies.__getitem__)  # the first of equal ones
    ages = tuple(0 if rank == source else age + 1 for rank, age in enumerate(standing.ages))
    return source, Standing(shares, ages, following)


def recalled(memory: Mapping[str, Tensor], world_size: int) -> Standing:
    """Return the standing that a memory holds; the first one if it holds none of so many ranks."""
    if not memory or memory["shares"].numel() != world_size:
        return first_standing(world_size)
    shares, ages = memory["shares"].tolist(), memory["ages"].tolist()
    return Standing(tuple(shares), tuple(ages), bool(memory["following"]))


def remembered(standing: Standing) -> dict[str, Tensor]:
    """Return a standing as memory, on the host, where it is read."""
    return {
        "shares": torch.tensor(standing.shares, dtype=torch.float64),
        "ages": torch.tensor(standing.ages),
        "following": torch.tensor(standing.following),
    }

"""Residuals of a job that goes on with another number of ranks.

What an old rank had not sent yet goes to the new rank with its number modulo the new world size, so
the sum over all ranks stays what it was: every gradient that was computed arrives, with the weight
of a gradient that is computed now. Only if the residuals of *all* old ranks are there: of some of
them, the sum would be of gradients of some of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradpilot.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Folded:
    """What a new rank begins with.

    Attributes:
        residuals: By parameter name; empty if any old rank's state is missing.
        dropped: Residuals that fell to this rank and were dropped.
        missing: Old ranks whose state is not there.
    """

    residuals: dict[str, Tensor]
    dropped: int
    missing: tuple[int, ...]


def fold(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> Folded:
    """Return the residuals that a rank takes over.

    Args:
        states: ``Handle.state_dict`` of the old ranks, all of one checkpoint, in any order.
        rank: This rank.
        world_size: Ranks there are now.

    Raises:
        ConfigError: The states are not of one checkpoint.
    """
    for name in ("world_size", "step"):
        values = {state[name] for state in states}
        if len(values) != 1:
            raise ConfigError(
                f"agent states of one checkpoint have one {name}, got {sorted(values)}; load the"
                " states that all ranks saved at one step"
            )
    by_rank = {int(state.get("rank", -1)): state for state in states}
    if len(by_rank) != len(states):
        raise ConfigError("two of the agent states are of one rank; load each of them once")
    missing = tuple(r for r in range(states[0]["world_size"]) if r not in by_rank)
    mine = [state for r, state in sorted(by_rank.items()) if r % world_size == rank]
    if missing:
        return Folded({}, sum(len(state["residuals"]) for state in mine), missing)
    scale = float(states[0]["loss_scale"])
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for state in mine:
        factor = scale / float(state["loss_scale"])
        for name, residual in state["residuals"].items():
            wide = torch.promote_types(residual.dtype, torch.float32)
            part = residual.to(wide) * factor
            sums[name] = sums[name] + part if name in sums else part
            dtypes[name] = residual.dtype
    return Folded({name: _narrow(sums[name], dtypes[name]) for name in sums}, 0, ())


def _narrow(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a sum in its own dtype; what exceeds its range is held at the limit."""
    limit = torch.finfo(dtype).max
    return total.clamp(-limit, limit).to(dtype)

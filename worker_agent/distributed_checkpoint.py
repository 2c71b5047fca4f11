"""The agent's state in a checkpoint of ``torch.distributed.checkpoint``.

There, equal keys of several ranks count as one value, and only keys that the loading side holds
already are read. A fresh handle has no residual yet, so ``Handle.state_dict`` given as it is would
lose all residuals without a word. Here every rank has one key of its own and one value behind it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gradpilot.worker_agent.handle import Handle


class RankState:
    """This rank's part: ``checkpoint.save({"model": model, "agent": handle.rank_state()})``.

    Args:
        handle: The handle.
        rank: Own rank in the model's process group.
        saved_by: Number of ranks whose states are to be loaded; None for the own rank's alone.
    """

    def __init__(self, handle: Handle, rank: int, saved_by: int | None = None) -> None:
        self._handle = handle
        self._rank = rank
        self._saved_by = saved_by

    def state_dict(self) -> dict[str, Any]:
        """Return the handle's state as one value under this rank's key.

        Before loading it is asked for the keys that are to be read.
        """
        if self._saved_by is not None:
            return {_key(rank): b"" for rank in range(self._saved_by)}
        file = io.BytesIO()
        torch.save(self._handle.state_dict(), file)
        return {_key(self._rank): file.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what was read; see ``Handle.load_state_dict``."""
        states = [torch.load(io.BytesIO(saved), weights_only=True) for saved in state.values()]
        self._handle.load_state_dict(states)


def _key(rank: int) -> str:
    return f"rank{rank}"

"""A file for each rank in a checkpoint that is a folder.

Frameworks let one rank write what all share. What an agent must keep differs between ranks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from gradpilot.errors import ConfigError
from gradpilot.worker_agent.handle import Handle

_NAME = "gradpilot-rank{:05d}.pt"


def save(handle: Handle, folder: str | os.PathLike[str]) -> None:
    """Write this rank's file; call on every rank, between two steps.

    Args:
        handle: Of the model.
        folder: The checkpoint; made if it is not there.
    """
    state = handle.state_dict()
    path = Path(folder) / _NAME.format(state["rank"])
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def load(handle: Handle, folder: str | os.PathLike[str]) -> bool:
    """Resume from such files; call on every rank, before the first step.

    With as many ranks as before, each reads its own file; with another number, all files, so the
    folder must then be one that all ranks see. What cannot be kept is dropped and counted, see
    ``Handle.load_state_dict``.

    Returns:
        Whether there was anything to resume from. If not, training goes on with empty residuals.

    Raises:
        ConfigError: A file is of another version, or not of this checkpoint.
    """
    place = Path(folder)
    own = place / _NAME.format(handle.rank)
    found = own if own.is_file() else place / _NAME.format(0)
    if not found.is_file():
        return False
    state = _read(found)
    if found == own and state["world_size"] == handle.world_size:
        handle.load_state_dict(state)
        return True
    # Files beyond the world size are left from another checkpoint in the same folder.
    names = (place / _NAME.format(rank) for rank in range(state["world_size"]))
    handle.load_state_dict([_read(path) for path in names if path.is_file()])
    return True


def _read(path: Path) -> dict[str, Any]:
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or "world_size" not in state:
        raise ConfigError(f"{path} is expected to hold the state of an agent, got something else")
    return state

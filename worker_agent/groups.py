"""Process groups of our own, beside the user's.

Groups are kept when a model is detached and used again by the next one: torch names groups of equal
ranks by counting those alive, so a new group after a destroyed one would meet the old group's
addresses in the store and time out while it connects.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(slots=True, eq=False)
class _Lent:
    key: tuple[object, ...]
    world: dist.ProcessGroup | None
    group: dist.ProcessGroup
    free: bool = False


_lent: list[_Lent] = []


def acquire(ranks: list[int], backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return a group that nothing else uses; all of ``ranks`` call it in the same order.

    Args:
        ranks: Ranks in the default group.
        backend: Name of the backend.
        timeout: Bound of every operation; None for the backend's default.
    """
    key, world = (tuple(ranks), backend, timeout), dist.group.WORLD
    for lent in _lent:
        if lent.free and lent.key == key and lent.world is world:
            lent.free = False
            return lent.group
    # Only the members need to take part: the model may live on a subgroup.
    group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    _lent.append(_Lent(key, world, group))
    return group


def release(group: dist.ProcessGroup) -> None:
    """Give a group back that no operation is under way on; all its ranks alike."""
    for lent in _lent:
        if lent.group is group:
            lent.free = True


def destroy_free() -> None:
    """Destroy the groups given back, which joins their workers; for the end of the process."""
    for lent in [lent for lent in _lent if lent.free]:
        _lent.remove(lent)
        if dist.is_initialized() and lent.world is dist.group.WORLD:
            dist.destroy_process_group(lent.group)

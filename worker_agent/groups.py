"""Process groups of our own, beside the user's.

Groups are kept when a model is detached and used again by the next one: torch names groups of equal
ranks by counting those alive, so a new group after a destroyed one would meet the old group's
addresses in the store and time out while it connects.

For the same reason nothing of ours may lie under a key that an earlier start of the job has used:
torchrun keeps its store when it restarts the ranks (torch 2.13), and there a late rank would take
the addresses, or the word of the first rank, from processes that are gone. The restart counter is
no remedy, since it differs between ranks of one start (pytorch#135712).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store


@dataclass(slots=True, eq=False)
class _Lent:
    key: tuple[object, ...]
    world: dist.ProcessGroup | None
    group: dist.ProcessGroup
    free: bool = False


_lent: list[_Lent] = []
_fresh: tuple[dist.ProcessGroup | None, Store] | None = None
"""The place in the store found last, and the default group of its time."""


def begin(group: dist.ProcessGroup) -> None:
    """Find a place in the store that no earlier start of the job has used; all ranks alike.

    Groups made from now on meet there.

    Args:
        group: The model's group, which has just been used to wrap it, so it belongs to this start.
    """
    global _fresh
    token = [os.urandom(8).hex()]  # not of the random module: its state is the user's
    dist.broadcast_object_list(token, group=group, group_src=0)
    default = dist.distributed_c10d._get_default_store()
    _fresh = (dist.group.WORLD, PrefixStore(f"gradpilot/{token[0]}", default))


def store() -> Store:
    """Return the place found last; the default store if none was found in this process."""
    if _fresh is not None and _fresh[0] is dist.group.WORLD:
        return _fresh[1]
    return dist.distributed_c10d._get_default_store()


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
    with _meeting_in(store()):
        # Only the members need to take part: the model may live on a subgroup.
        group = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True
        )
    assert isinstance(group, dist.ProcessGroup)
    _lent.append(_Lent(key, world, group))
    return group


@contextlib.contextmanager
def _meeting_in(place: Store) -> Iterator[None]:
    """Let new groups exchange their addresses there: torch takes them to the default store."""
    of_groups = dist.distributed_c10d._world.pg_map
    default = dist.group.WORLD
    assert default is not None
    backend, before = of_groups[default]
    of_groups[default] = (backend, place)
    try:
        yield
    finally:
        of_groups[default] = (backend, before)


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

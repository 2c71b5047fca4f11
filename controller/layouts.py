"""Which layouts ranks may announce while DDP lays its buckets out anew.

DDP rebuilds them on all ranks at once, but catalogs come one after another: the first opens the new
layout, the others must follow it, and one that connects again before it has rebuilt is only late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from gradpilot.controller.member import Member

PAST_LAYOUTS = 8
"""Layouts of the same start of the job that a slow rank may still announce."""


class PastLayouts:
    """Digests of the layouts that a run had since its job started."""

    def __init__(self) -> None:
        self._digests: deque[str] = deque(maxlen=PAST_LAYOUTS)

    def add(self, digest: str) -> None:
        """The run leaves this layout."""
        self._digests.append(digest)

    def clear(self) -> None:
        """The job was started again."""
        self._digests.clear()

    def is_behind(
        self, members: Mapping[int, Member], rank: int, digest: str, current: str
    ) -> bool:
        """Return whether a rank that announces ``digest`` has not rebuilt yet while others have."""
        others = (m.layout for r, m in members.items() if r != rank)
        return digest in self._digests and current in others


def may_open(members: Mapping[int, Member], rank: int, current: str, world_size: int) -> bool:
    """Return whether a rank may open a new layout: all have the present one, or no other has."""
    have = {r for r, m in members.items() if m.layout == current}
    return len(have) == world_size or have <= {rank}

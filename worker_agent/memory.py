"""What compressors remember from step to step: warm starts, momentum, adapted settings.

Kept per bucket, and committed or discarded together with the residuals of a step, so that a step
that was not finite leaves no trace. A bucket that gets another compressor or other settings starts
without memory, and so does one that DDP laid out anew; nothing of the gradient is lost by that,
since what was not sent lies in the residual.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.compressors.base import COMPRESSORS, NOTHING

Owner = str
"""A compressor with its settings, as text: memories must outlive a process in a checkpoint."""


def owner_of(option: Option) -> Owner:
    """Return who may read what a compressor remembers; another ratio may, other settings not."""
    return " ".join((option.compressor, *(f"{s.name}={s.value}" for s in option.settings)))


class MemoryStore:
    """Memories of all buckets of one model on one rank."""

    def __init__(self) -> None:
        self._committed: dict[str, tuple[Owner, Mapping[str, Tensor]]] = {}
        self._staged: dict[str, tuple[Owner, Mapping[str, Tensor]]] = {}

    @property
    def elements(self) -> int:
        """Return the elements held."""
        return sum(t.numel() for _, held in self._committed.values() for t in held.values())

    def __bool__(self) -> bool:
        """Return whether anything is remembered."""
        return bool(self._committed)

    def recall(self, bucket: str, owner: Owner) -> Mapping[str, Tensor]:
        """Return what ``owner`` remembers of a bucket."""
        known, held = self._committed.get(bucket, ("", NOTHING))
        return held if known == owner else NOTHING

    def stage(self, bucket: str, owner: Owner, memory: Mapping[str, Tensor]) -> None:
        """Note a bucket's new memory; effective on ``commit``."""
        if memory or bucket in self._committed:
            self._staged[bucket] = (owner, memory)

    def commit(self) -> None:
        """Make the staged memories current."""
        for bucket, (owner, memory) in self._staged.items():
            if memory:
                self._committed[bucket] = (owner, memory)
            else:
                self._committed.pop(bucket, None)
        self._staged.clear()

    def discard(self) -> None:
        """Forget the staged memories; those of the step before stay."""
        self._staged.clear()

    def rescale(self, factor: float) -> None:
        """Multiply what grows with the gradient, as the loss scale was; between two steps only."""
        for bucket, (owner, held) in self._committed.items():
            linear = COMPRESSORS.get(owner.split()[0]).linear_memory
            scaled = {name: t * factor if name in linear else t for name, t in held.items()}
            self._committed[bucket] = (owner, scaled)

    def keep_only(self, buckets: Iterable[str]) -> None:
        """Drop the memories of buckets that are no more."""
        present = set(buckets)
        for bucket in [b for b in self._committed if b not in present]:
            del self._committed[bucket]

    def state_dict(self) -> dict[str, dict[str, object]]:
        """Return all memories by bucket, as ``{"owner": str, "tensors": {name: tensor}}``."""
        return {
            bucket: {"owner": owner, "tensors": {k: t.clone() for k, t in held.items()}}
            for bucket, (owner, held) in self._committed.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, object]]) -> None:
        """Take over memories; a bucket that never comes again keeps its entry until the rebuild."""
        self._staged.clear()
        self._committed = {}
        for bucket, entry in state.items():
            tensors = entry["tensors"]
            assert isinstance(tensors, Mapping)
            self._committed[bucket] = (
                str(entry["owner"]),
                {name: tensor.clone() for name, tensor in tensors.items()},
            )

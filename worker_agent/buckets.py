"""Identity of buckets: by their parameters and layout, never by index.

DDP lays its buckets out anew after the first or second iteration, or never, depending on mode and
version. So nothing here assumes when a layout is final; it is compared at every call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from gradpilot.protos.messages import Bucket, Layout


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A bucket as it stands in the present layout.

    Attributes:
        bucket: Its identity as the controller sees it.
        names: Names of its parameters, in buffer order.
        spans: First element and number of elements of each parameter in the flat buffer.
        shapes: Shape of each parameter.
    """

    bucket: Bucket
    names: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    shapes: tuple[torch.Size, ...]

    @property
    def key(self) -> str:
        """Return the fingerprint."""
        return self.bucket.fingerprint

    @property
    def index(self) -> int:
        """Return the position in the order in which DDP issues buckets."""
        return self.bucket.index


class BucketTable:
    """Turns what DDP hands to the hook into slots, and notices when the layout changes.

    Args:
        named_parameters: Names and parameters of the wrapped model; names must be equal on all
            ranks.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        self._names = {id(p): name for name, p in named_parameters}
        self._known: dict[int, tuple[tuple[int, ...], Slot]] = {}
        self._seen: list[Slot] = []
        self.layout: Layout | None = None
        self.slots: tuple[Slot, ...] = ()

    def identify(self, bucket: GradBucket) -> Slot:
        """Return the slot of a bucket; called for every bucket of a step, in order."""
        identity = tuple(map(id, bucket.parameters()))
        index = bucket.index()
        known = self._known.get(index)
        if known is None or known[0] != identity:
            slot = self._describe(bucket, index)
            self._known[index] = (identity, slot)
        else:
            slot = known[1]
        self._seen.append(slot)
        return slot

    def end_step(self) -> bool:
        """Close a step: all its buckets have been identified.

        Returns:
            Whether the layout differs from that of the step before (also after the first step).
        """
        seen, self._seen = tuple(self._seen), []
        if seen == self.slots:
            return False
        self.slots = seen
        self.layout = Layout.of(tuple(slot.bucket for slot in seen))
        return True

    def _describe(self, bucket: GradBucket, index: int) -> Slot:
        buffer = bucket.buffer()
        parameters = bucket.parameters()
        names = tuple(
            self._names.get(id(p), f"unnamed.{index}.{i}") for i, p in enumerate(parameters)
        )
        spans: tuple[tuple[int, int], ...]
        if buffer.is_sparse:  # one parameter, which DDP gives no view of
            spans = ((0, buffer.numel()),)
        else:
            base = int(buffer.storage_offset())
            spans = tuple((int(g.storage_offset()) - base, g.numel()) for g in bucket.gradients())
        shapes = tuple(p.shape for p in parameters)
        dtype = str(buffer.dtype).removeprefix("torch.")
        text = repr((names, spans, tuple(map(tuple, shapes)), dtype, buffer.numel()))
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:12]
        described = Bucket(fingerprint, index, buffer.numel(), dtype, len(parameters))
        return Slot(described, names, spans, shapes)

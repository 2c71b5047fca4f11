"""Identity of what a sharded model reduces: one unit's gradients, laid out shard by shard.

A unit is what the framework reduces at once: the parameters of one ``fully_shard`` call. Its
gradient is a matrix of N rows, one a shard, whose columns are the parameters; every parameter is
padded so that N divides its rows. So a parameter's part is scattered, and residuals are kept by
(parameter, shard), under names such as ``layers.0.weight#3``.

Letters: N ranks of the shard group, C elements of a shard, n = N C.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gradpilot.protos.messages import Bucket
from gradpilot.worker_agent.buckets import Slot

Columns = tuple[tuple[str, int], ...]
"""Name and elements in one shard of each parameter that is trained, in order."""


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters that are reduced at once.

    Attributes:
        name: Name of the module, "" for the root.
        index: Number of the unit in the model.
        columns: Returns its parameters; those frozen later are gone from it.
    """

    name: str
    index: int
    columns: Callable[[], Columns]
    _slots: dict[tuple[Columns, int, torch.dtype], Slot] = field(default_factory=dict)

    def slot(self, shards: int, dtype: torch.dtype) -> Slot:
        """Return the present place of its gradient.

        Args:
            shards: Number N of shards that the gradient consists of; 1 for one rank's own.
            dtype: Of the gradient.
        """
        columns = self.columns()
        key = (columns, shards, dtype)
        if key not in self._slots:
            self._slots[key] = _describe(self, columns, shards, dtype)
        return self._slots[key]


def _describe(unit: Unit, columns: Columns, shards: int, dtype: torch.dtype) -> Slot:
    names, spans, start = [], [], 0
    for shard in range(shards):
        for name, elements in columns:
            names.append(f"{name}#{shard}" if shards > 1 else name)
            spans.append((start, elements))
            start += elements
    kind = str(dtype).removeprefix("torch.")
    text = repr((unit.name, columns, shards, kind))
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:12]
    shapes = tuple(torch.Size((length,)) for _, length in spans)
    bucket = Bucket(fingerprint, unit.index, start, kind, len(columns))
    return Slot(bucket, tuple(names), tuple(spans), shapes)

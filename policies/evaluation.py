"""Tables of predictions: of options on every bucket, and of whole candidates.

Shapes: K options, B buckets, P candidates (one option per bucket each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Table:
    """Cost and worth of options on every bucket, (K, B) unless said otherwise.

    Attributes:
        head: Number of the head, (K,).
        ratio: Kept fraction, (K,).
        safe: Whether it is the dense or the bf16 option, (K,).
        native: Whether its buckets may be in flight at once, (K,).
        compress: Seconds before the last collective is issued.
        decompress: Seconds after the reply.
        latency: Wire seconds that do not depend on bytes.
        transfer: Wire seconds that bytes occupy.
        gain: Share of ||corrected||^2 that arrives, skipping included.
        credit: The same as the floor of gain counts it: over the family's ``floor_factor``.
        efficiency: Progress of a step relative to a dense one.
        size: Payload bytes handed to collectives.
    """

    head: Indices
    ratio: Floats
    safe: NDArray[np.bool_]
    native: NDArray[np.bool_]
    compress: Floats
    decompress: Floats
    latency: Floats
    transfer: Floats
    gain: Floats
    credit: Floats
    efficiency: Floats
    size: Floats

    @staticmethod
    def join(tables: Sequence[Table]) -> Table:
        """Return the rows of all tables in order."""
        names = Table.__slots__
        return Table(*(np.concatenate([getattr(t, name) for t in tables]) for name in names))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the models predict for P candidates, each (P,) but ``rows`` (P, B).

    ``credit`` is what a floor of gain is compared with; see ``Table``.
    """

    rows: Indices
    statistical_loss: Floats
    compression_seconds: Floats
    synchronisation_seconds: Floats
    step_seconds: Floats
    gain: Floats
    credit: Floats
    efficiency: Floats
    wire_ratio: Floats
    safe: NDArray[np.bool_]

    @property
    def objectives(self) -> Floats:
        """Return the three objectives, (P, 3), all minimised."""
        return np.stack(
            [self.statistical_loss, self.compression_seconds, self.synchronisation_seconds], axis=1
        )

    @property
    def cost(self) -> Floats:
        """Return seconds per unit of progress, step time / efficiency; NaN where unknown."""
        return self.step_seconds / self.efficiency

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Return which rows have only finite numbers."""
        return np.isfinite(self.objectives).all(axis=1) & np.isfinite(self.cost)

    def join(self, other: Evaluation) -> Evaluation:
        """Return the candidates of both, own ones first."""
        return Evaluation(
            *(
                np.concatenate([getattr(self, name), getattr(other, name)])
                for name in self.__slots__
            )
        )

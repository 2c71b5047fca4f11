"""Count sketch (Sketched-SGD, FetchSGD): the elements that are largest in the mean, by all-reduce.

A sketch of the gradient is linear, so that an all-reduce of sketches is the sketch of the sum. All
ranks read the same k heavy hitters from it, and a second all-reduce averages their true values.

Letters: N world size, n elements of the bucket, k kept elements, R rows and W columns of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors._agreed import places_rounds, values_rounds
from gradpilot.worker_agent.compressors._select import kept, largest
from gradpilot.worker_agent.compressors._sketch import CountSketch
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Compressor, Rounds
from gradpilot.worker_agent.compressors.settings import kept_fraction, real, whole


@COMPRESSORS.register("countsketch")
@dataclass(frozen=True, kw_only=True)
class CountSketchTopK(Compressor):
    """Keeps the k elements that look largest in the sketch of all ranks' sum.

    The values that a sketch gives back are noisy and belong to no rank: a median is not linear, so
    no rank could say what of its gradient was sent, and error feedback would have to live in the
    sketch. Hence the form of Sketched-SGD, with a second, exact round: a rank sends its own values
    at the k places, everything else waits in its residual, and the sketch decides nothing but the
    places. It costs k values more than the one-round form of FetchSGD.

    Unlike every selection by one rank it finds elements that are large in the mean without being
    large anywhere. It takes large sketches for that: on cubed normal gradients of 4 ranks that
    share half, at a ratio of 0.01, 3 rows of 8 k columns (a quarter of the dense bytes) find half
    of the energy that the best k elements hold, of 16 k columns three quarters; one rank's top-k
    finds 0.6. Gradients of fewer and heavier hitters suit it better. To sketch and to read back
    costs a thread about 10 ms for each million elements.

    Ranks read the places from the same bits, each for itself; they need alike processors.

    Attributes:
        ratio: Kept fraction k/n, (0, 1].
        rows: Rows R of the sketch, odd.
        width: Columns W of the sketch for each kept element. A bucket whose sketch and values would
            be no smaller than its gradient is sent whole.
    """

    name: ClassVar[str] = "countsketch"
    source: ClassVar[str] = "Ivkin et al., Sketched-SGD, NeurIPS 2019; Rothchild et al., FetchSGD"
    gain_model: ClassVar[str] = "energy"
    gain_factor = 0.4

    ratio: float = kept_fraction(0.01)
    rows: int = whole(3, 3, 15)
    width: float = real(8.0, 0.1, 1e6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows % 2 == 0:
            raise ConfigError(f"{self.name}: setting rows must be odd, got {self.rows}")

    @classmethod
    def ladder(cls) -> Sequence[CountSketchTopK]:
        """Return ratios about a factor of 3 apart."""
        return tuple(cls(ratio=ratio) for ratio in (0.001, 0.003, 0.01, 0.03))

    def wire(
        self, n: int, shapes: Sequence[torch.Size] = (), ranks: int = 1
    ) -> tuple[WireRound, ...]:
        """Return the fp32 sketch of R W elements and k fp32 values; n values if that is less."""
        k, columns = self._sizes(n)
        if k == n:
            return (WireRound("all_reduce", 4 * n),)
        sketch = WireRound("all_reduce", 4 * self.rows * columns, skippable=False)
        return (sketch, WireRound("all_reduce", 4 * k))

    def rounds(self, grad: Tensor, at: At) -> Rounds:
        """Add up sketches, read the places, average all ranks' values there."""
        n = grad.numel()
        k, columns = self._sizes(n)
        if k == n:
            return (yield from values_rounds(grad, at, "fp32"))

        shape = CountSketch(n, self.rows, columns, at.generator("countsketch"), grad.device)
        total = yield AllReduce(shape.sketch(grad).view(-1), skippable=False)

        # The mean's place is free until there is a mean.
        free = at.feedback and grad.dtype == torch.float32
        room = at.room(grad) if free else torch.empty_like(grad, dtype=torch.float32)
        indices = largest(shape.estimate(total.view(self.rows, columns), room), k)
        return (yield from places_rounds(grad, indices, replace(at, out=room) if free else at))

    def _sizes(self, n: int) -> tuple[int, int]:
        """Return how many elements are kept, and columns of a sketch; k = n needs no sketch."""
        k = kept(n, self.ratio)
        columns = math.ceil(self.width * k)
        return (k, columns) if self.rows * columns + k < n else (n, 0)

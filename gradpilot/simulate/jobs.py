"""Training jobs as numbers: buckets, when they are ready, what computing costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Bucket, Layout
from gradpilot.simulate.recorded import Gradients, document, task

Floats = NDArray[np.float64]

FIRST_CAP, CAP = 1 << 20, 25 << 20
"""DDP's bucket sizes in bytes: the first bucket is smaller, so that communication begins early."""

FLOPS = 7.5e12
"""Sustained fp32 operations a second of the device that the two large jobs stand for: about half of
what the data sheet of a V100 says (from memory)."""

SELECT_SECONDS = 0.4e-9
"""Top-k of a V100 per element: 0.35 to 0.42 ns follow from Table II of Tyagi and Swany, *Flexible
Communication* (IEEE BigData 2023); derived here as all-gather time less the model's."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model in training, without its network.

    Attributes:
        name: Its name.
        what: One line for people.
        layout: Buckets in the order of backward.
        lead_seconds: From the beginning of a step to the first bucket being ready.
        ready_seconds: From there to each bucket, (B,).
        gradients: What its gradients look like.
        device_scale: Seconds of its device over those of the recording machine, for compressors.
    """

    name: str
    what: str
    layout: Layout
    lead_seconds: float
    ready_seconds: tuple[float, ...]
    gradients: Gradients
    device_scale: float = 1.0

    @property
    def compute_seconds(self) -> float:
        """Return what a step takes without any communication."""
        return self.lead_seconds + max(self.ready_seconds)

    @property
    def elements(self) -> Floats:
        """Return the elements of every bucket, (B,)."""
        return np.array([b.elements for b in self.layout.buckets], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that become ready together, and the multiplications that they take part in."""

    parameters: int
    work: float


def make_job(name: str) -> Job:
    """Return a job by name.

    Raises:
        ConfigError: No such job.
    """
    if name == "cnn":
        return _recorded("cnn")
    if name == "resnet50":
        images = 32
        layers = [Layer(p, images * w) for p, w in _resnet50()]
        return _large(name, "ResNet50, 25.6 M parameters, 32 images a rank", layers, "cnn")
    if name == "transformer":
        tokens = 32 * 128
        layers = [Layer(p, tokens * w) for p, w in _bert()]
        what = "transformer encoder, 110 M parameters, 32 x 128 tokens a rank"
        return _large(name, what, layers, "transformer")
    raise ConfigError(f"unknown model {name!r}; known: {', '.join(JOBS)}")


JOBS = ("resnet50", "transformer", "cnn")
"""Names of jobs."""


def _recorded(name: str) -> Job:
    """Return a job that was recorded itself: its own buckets, times and gradients."""
    found = task(name)
    return Job(
        name,
        found.what,
        _layout(name, found.elements),
        found.lead_seconds,
        found.ready_seconds,
        Gradients(found, range(len(found.elements)), found.elements),
    )


def _large(name: str, what: str, layers: Sequence[Layer], recording: str) -> Job:
    """Return a job from its layers; its gradients are those of a small training.

    Time goes by multiplications: forward once, backward twice. Buckets fill in the order of
    backward as DDP fills them. Every bucket shows what the recorded bucket at the same relative
    depth showed.
    """
    forward = 2 * sum(layer.work for layer in layers) / FLOPS
    sizes, ready, seconds = [0], [0.0], forward
    for layer in reversed(layers):
        seconds += 4 * layer.work / FLOPS
        if 4 * sizes[-1] >= (CAP if len(sizes) > 1 else FIRST_CAP):
            sizes.append(0)
            ready.append(0.0)
        sizes[-1] += layer.parameters
        ready[-1] = seconds
    found = task(recording)
    depth = (np.cumsum(sizes) - 0.5 * np.array(sizes)) / sum(sizes)
    known = np.array(found.elements, dtype=np.float64)
    ends = np.cumsum(known) / known.sum()
    return Job(
        name,
        f"{what}; gradients as of the {recording} that was recorded",
        _layout(name, sizes),
        ready[0],
        tuple(at - ready[0] for at in ready),
        Gradients(found, [int(i) for i in np.searchsorted(ends, depth)], sizes),
        SELECT_SECONDS / _recorded_select(),
    )


def _layout(name: str, sizes: Sequence[int]) -> Layout:
    return Layout.of(tuple(Bucket(f"{name}{i}", i, n) for i, n in enumerate(sizes)))


def _recorded_select() -> float:
    """Return what top-k of 1 % costs per element on the recording machine."""
    rows: list[float] = [
        row["compress_seconds"] / row["elements"]
        for row in document()["calibration"]
        if (row["compressor"], row["ratio"]) == ("topk", 0.01) and row["elements"] > 1 << 18
    ]
    return min(rows)


# --- layers: (parameters, multiplications for one image or token), in the order of forward --------


def _resnet50() -> Iterator[tuple[int, float]]:
    def conv(wide: int, out: int, size: int, side: int) -> tuple[int, float]:
        weights = wide * out * size * size
        return weights + 2 * out, float(weights * side * side)  # with its batch norm

    yield conv(3, 64, 7, 112)
    wide = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        side = 56 >> stage
        for block in range(blocks):
            first = 2 * side if block == 0 and stage else side  # the stride is in the 3 x 3
            yield conv(wide, width, 1, first)
            yield conv(width, width, 3, side)
            yield conv(width, 4 * width, 1, side)
            if block == 0:
                yield conv(wide, 4 * width, 1, side)
            wide = 4 * width
    yield 2048 * 1000 + 1000, 2048.0 * 1000


def _bert() -> Iterator[tuple[int, float]]:
    width, words, places = 768, 30522, 512
    yield (words + places + 2) * width + 2 * width, 0.0  # looked up, not multiplied
    for _ in range(12):
        yield 4 * width * width + 4 * width + 2 * width, 4.0 * width * width
        yield 8 * width * width + 5 * width + 2 * width, 8.0 * width * width
    yield width * width + width, float(width * width) / 128  # of the first token only

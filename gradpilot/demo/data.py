"""What is learned: two sets of small images that need no network."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradpilot.errors import ConfigError

DATASETS = ("digits", "fashion-mnist")

FASHION_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts it."""

_FASHION_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


@dataclass(frozen=True, slots=True)
class Dataset:
    """Images as rows of floats in about [-1, 1], with class numbers.

    Attributes:
        name: One of ``DATASETS``.
        train_x: (samples, features), float32.
        train_y: (samples,), int64.
        test_x: Like ``train_x``; never trained on.
        test_y: Like ``train_y``.
        classes: Number of classes.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int = 10

    @property
    def features(self) -> int:
        """Return the number of pixels of an image."""
        return self.train_x.shape[1]


def choose(wanted: str = "auto", folder: Path = FASHION_FOLDER) -> str:
    """Return the name of the data set to use.

    Args:
        wanted: A name, or ``auto`` for Fashion-MNIST where it is installed and digits elsewhere.
        folder: Where Fashion-MNIST would be.

    Raises:
        ConfigError: It is unknown or not installed; says how to get it.
    """
    has_fashion = all((folder / f).is_file() for pair in _FASHION_FILES.values() for f in pair)
    if wanted == "auto":
        wanted = "fashion-mnist" if has_fashion else "digits"
    if wanted not in DATASETS:
        raise ConfigError(f"dataset must be auto, {' or '.join(DATASETS)}, got {wanted!r}")
    if wanted == "fashion-mnist" and not has_fashion:
        raise ConfigError(
            f"Fashion-MNIST is not in {folder}; on Debian: apt-get install dataset-fashion-mnist"
        )
    if wanted == "digits" and importlib.util.find_spec("sklearn") is None:
        raise ConfigError(
            "the handwritten digits come with scikit-learn: pip install 'gradpilot[demo]'"
        )
    return wanted


def load(name: str, folder: Path = FASHION_FOLDER) -> Dataset:
    """Return a data set; equal on every call and rank.

    Raises:
        ConfigError: A file of Fashion-MNIST is damaged.
    """
    return _digits() if name == "digits" else _fashion(folder)


def batches(dataset: Dataset, size: int, rank: int, world_size: int, seed: int) -> Iterator[Tensor]:
    """Yield this rank's sample numbers of every step, without end.

    Every epoch is one permutation of all samples, the same on all ranks, of which each rank takes
    its share.

    Args:
        dataset: What to draw from.
        size: Samples per rank and step.
        rank: This rank.
        world_size: Ranks N; ``size * N`` samples make a step.
        seed: Seed of the permutations.
    """
    together = size * world_size
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(dataset.train_x), generator=generator)
        for start in range(0, len(order) - together + 1, together):
            yield order[start + rank * size : start + (rank + 1) * size]


def _digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels; a third is kept for the test."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32) / 8.0 - 1.0
    y = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(x) // 3], order[len(x) // 3 :]
    return Dataset("digits", x[train], y[train], x[test], y[test])


def _fashion(folder: Path) -> Dataset:
    """70,000 articles of clothing of 28 x 28 pixels, 10,000 of them for the test."""
    parts = {}
    for part, (images, labels) in _FASHION_FILES.items():
        x = _read_idx(folder / images).to(torch.float32) / 127.5 - 1.0
        parts[part] = (x.flatten(1), _read_idx(folder / labels).to(torch.int64))
    return Dataset("fashion-mnist", *parts["train"], *parts["test"])


def _read_idx(path: Path) -> Tensor:
    """Return a file of the IDX format: magic 0, 0, 8 (bytes), rank, then sizes and bytes."""
    raw = bytearray(gzip.decompress(path.read_bytes()))
    if raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise ConfigError(f"{path} is no IDX file of bytes; install dataset-fashion-mnist again")
    begin = 4 + 4 * raw[3]
    shape = [int.from_bytes(raw[i : i + 4], "big") for i in range(4, begin, 4)]
    values = torch.frombuffer(raw, dtype=torch.uint8)[begin:]
    if values.numel() != torch.Size(shape).numel():
        raise ConfigError(f"{path} holds {values.numel()} bytes, its header says {shape}")
    return values.view(shape)

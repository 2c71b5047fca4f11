from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.demo import data
from gradpilot.errors import ConfigError


def _write_idx(path: Path, values: torch.Tensor) -> None:
    header = bytes((0, 0, 8, values.dim()))
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(gzip.compress(header + sizes + bytes(values.flatten().tolist())))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fashion-MNIST in small: 30 and 20 images of 28 x 28."""
    generator = torch.Generator().manual_seed(0)
    for (images, labels), count in zip(data._FASHION_FILES.values(), (30, 20), strict=True):
        pixels = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        _write_idx(tmp_path / images, pixels)
        _write_idx(tmp_path / labels, torch.arange(count, dtype=torch.uint8) % 10)
    return tmp_path


def test_digits_are_real_and_split() -> None:
    digits = data.load("digits")
    assert len(digits.train_x) + len(digits.test_x) == 1797
    assert digits.features == 64
    assert digits.train_y.unique().tolist() == list(range(10))  # type: ignore[no-untyped-call]
    assert -1 <= digits.train_x.min() < digits.train_x.max() <= 1
    again = data.load("digits")
    assert torch.equal(digits.train_x, again.train_x)
    assert torch.equal(digits.test_y, again.test_y)


def test_fashion_is_read_from_its_files(folder: Path) -> None:
    fashion = data.load("fashion-mnist", folder)
    assert fashion.train_x.shape == (30, 784)
    assert fashion.test_y.tolist() == [i % 10 for i in range(20)]
    assert fashion.train_x.dtype == torch.float32
    assert -1 <= fashion.train_x.min() < -0.9
    assert 0.9 < fashion.train_x.max() <= 1


def test_auto_takes_fashion_where_it_is(folder: Path, tmp_path: Path) -> None:
    assert data.choose("auto", folder) == "fashion-mnist"
    assert data.choose("auto", tmp_path / "empty") == "digits"
    assert data.choose("digits", folder) == "digits"


def test_what_is_missing_is_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="apt-get install dataset-fashion-mnist"):
        data.choose("fashion-mnist", tmp_path)
    with pytest.raises(ConfigError, match="auto, digits or fashion-mnist"):
        data.choose("imagenet", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gradpilot\[demo\]"):
        data.choose("digits", tmp_path)


@pytest.mark.parametrize("raw", [b"", b"\0\0\x0b\x01\0\0\0\x01x", b"\0\0\x08\x01\0\0\0\x05x"])
def test_a_damaged_file_is_refused(folder: Path, raw: bytes) -> None:
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(raw))
    with pytest.raises(ConfigError, match="t10k-labels"):
        data.load("fashion-mnist", folder)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 3))
def test_ranks_draw_different_samples_of_one_permutation(
    size: int, world_size: int, seed: int
) -> None:
    x = torch.zeros(60, 1)
    small = data.Dataset("digits", x, torch.zeros(60), x, torch.zeros(60))
    ranks = [data.batches(small, size, r, world_size, seed) for r in range(world_size)]
    per_epoch = 60 // (size * world_size)
    drawn = [int(i) for _ in range(per_epoch) for rank in ranks for i in next(rank)]
    assert len(drawn) == len(set(drawn)) == per_epoch * size * world_size
    assert len(next(ranks[0])) == size  # the next epoch follows

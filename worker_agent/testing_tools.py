"""What the suites for compressors and collectives are made of: gradients, comparisons, refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def gradients(
    n: int, world_size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return a heavy-tailed gradient of n elements for every rank, of which half is common."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n, generator=generator)
    own = (torch.randn(n, generator=generator) for _ in range(world_size))
    return [((common + o) ** 3).to(dtype) for o in own]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, so that NaN equals NaN."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def relative_error(estimate: Tensor, truth: Tensor) -> float:
    """Return ||estimate - truth|| / ||truth||, computed in float64."""
    error = torch.linalg.vector_norm(estimate.double() - truth.double())
    norm = torch.linalg.vector_norm(truth.double())
    return float(error / norm) if float(norm) > 0.0 else float(error)


def average(tensors: Sequence[Tensor]) -> Tensor:
    """Return the mean of equally long vectors in float64."""
    return torch.stack([t.double() for t in tensors]).mean(0)


@contextlib.contextmanager
def refusal(kind: type[Exception], text: str) -> Iterator[None]:
    """Expect an error whose message holds ``text``, without importing pytest."""
    message = None
    try:
        yield
    except kind as error:
        message = str(error)
    assert message is not None, f"expected {kind.__name__} about {text}"
    assert text in message, f"the message does not name {text!r}: {message}"

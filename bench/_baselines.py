"""What compressors are measured against: plain passes over memory, torch.topk, others' codecs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOPK_RATIOS = (0.001, 0.01, 0.1)

COPY = "copy to fresh memory"
SUM_OF_SQUARES = "sum of squares"
TOPK = "torch.topk"

_CODECS = (
    "Float16Compression",
    "ScaledFloat16Compression",
    "Uniform8BitQuantization",
    "Quantile8BitQuantization",
)


@dataclass(frozen=True)
class Baseline:
    """Something to compare with.

    Attributes:
        name: For people.
        compress: Turns a gradient into what would be sent.
        decompress: Turns that into a gradient; None if there is nothing to measure.
        size: Returns the bytes of what would be sent, 0 if nothing would be.
        mean: Returns the mean of the ranks' gradients as it would arrive; None if meaningless.
    """

    name: str
    compress: Callable[[Tensor], Any]
    decompress: Callable[[Any], Tensor] | None = None
    size: Callable[[Any], int] = lambda sent: 0
    mean: Callable[[Sequence[Tensor]], Tensor] | None = None


def baselines(n: int, ranks: int) -> list[Baseline]:
    """Return all baselines for gradients of n elements; hivemind's only where it is installed."""
    room = torch.empty(n)
    found = [
        Baseline("copy in place", room.copy_),
        Baseline(COPY, torch.clone),
        Baseline(SUM_OF_SQUARES, lambda x: torch.dot(x, x)),
        *(_topk(n, ratio) for ratio in TOPK_RATIOS),
        _fp16_hook(room, ranks),
    ]
    codecs, _ = _hivemind()
    return found + [_codec(*pair) for pair in codecs]


def missing() -> list[str]:
    """Return what could not be imported, in words."""
    _, problem = _hivemind()
    return [problem] if problem else []


def _topk(n: int, ratio: float) -> Baseline:
    k = max(1, int(ratio * n))

    def select(x: Tensor) -> tuple[Tensor, Tensor]:
        indices = torch.topk(x.abs(), k, sorted=False).indices
        return indices, x[indices]

    return Baseline(f"{TOPK} {100 * ratio:g}%", select, size=lambda sent: 8 * k)


def _fp16_hook(room: Tensor, ranks: int) -> Baseline:
    """Return what fp16_compress_hook computes around its all-reduce."""

    def compress(x: Tensor) -> Tensor:
        return x.to(torch.float16).div_(ranks)

    def mean(grads: Sequence[Tensor]) -> Tensor:
        total = compress(grads[0])
        for grad in grads[1:]:
            total += compress(grad)
        return total.float()

    return Baseline(
        "torch fp16_compress_hook arithmetic",
        compress,
        lambda sent: room.copy_(sent),
        lambda sent: sent.nbytes,
        mean,
    )


def _hivemind() -> tuple[list[tuple[str, Any]], str]:
    """Return hivemind's codecs by name, or why there are none."""
    try:
        module = importlib.import_module("hivemind.compression")
    except ImportError as error:
        return [], f"hivemind is not importable: {error}"
    return [(name, getattr(module, name)) for name in _CODECS if hasattr(module, name)], ""


def _codec(name: str, kind: Any) -> Baseline:
    codec = kind()
    info = importlib.import_module("hivemind.compression").CompressionInfo

    def compress(x: Tensor) -> Any:
        return codec.compress(x, info.from_tensor(x))

    def mean(grads: Sequence[Tensor]) -> Tensor:
        decoded = [codec.extract(compress(g)).double() for g in grads]
        return torch.stack(decoded).mean(0).float()

    return Baseline(
        f"hivemind {name}", compress, codec.extract, lambda sent: len(sent.buffer), mean
    )

"""What is verified at sampled steps of every row: ranks in sync, and nothing lost or sent twice.

Invariant 3 of the agent, ``sent + residual == corrected``, is looked at from outside, without its
code. Before a sampled step a rank computes its gradient a second time, beside DDP, and reads its
residual; after the step it reads the residual again. The difference is what it sent, and the mean
of that over ranks must be what the optimizer got. Ranks need not exchange vectors for it: each
notes the scalar product with one random vector, and products add up as vectors do. Whatever was
lost would show in it, but for a chance of about the tolerance.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from bench.tta.records import Check, RankRecord
from gradpilot.demo.model import checksum
from gradpilot.protos.messages import Option, Setting
from gradpilot.worker_agent.compressors.base import create

TOLERANCE = 1e-4
SIXTEEN_BIT = 0.03
"""Share of the norm by which a random product may differ: by the rounding of fp32 sums, or of sums
that travel in 16 bits (bf16 rounds by up to 1/256; products differed by up to 0.005)."""

COUNT = 4


def sampled(steps: int) -> tuple[int, ...]:
    """Return the steps that are checked: ``COUNT`` of them, spread evenly."""
    return tuple(sorted({int((i + 0.5) * steps / COUNT) for i in range(COUNT)}))


def tolerance_of(options: Sequence[Option]) -> float:
    """Return ``Check.tolerance`` of the options in force."""
    if any(map(_drops, options)):
        return -1.0
    return SIXTEEN_BIT if any(map(_rounds, options)) else TOLERANCE


def _drops(option: Option) -> bool:
    """Return whether something is left out that no residual holds."""
    skips = option.skip > 0 and not option.skip_feedback
    scaled = Setting("estimate", "unbiased") in option.settings
    momentum = option.compressor == "dgc"  # which holds back more than its residual tells
    return skips or scaled or momentum


def _rounds(option: Option) -> bool:
    """Return whether sums of it travel in 16 bits."""
    if option.compressor in ("bf16", "fp16"):
        return True
    return getattr(create(option), "wire_dtype", "fp32") != "fp32"


class Checker:
    """Checks one step.

    Args:
        model: The model, without DDP.
        residuals: Returns the residual of every parameter that has one, flat, by name.
        step: The step.
    """

    def __init__(
        self, model: nn.Module, residuals: Callable[[], Mapping[str, Tensor]], step: int
    ) -> None:
        self._model, self._residuals, self._step = model, residuals, step
        self._corrected: Tensor | None = None

    def before(self, loss: Tensor) -> None:
        """Note gradient and residual before the step.

        Args:
            loss: Of the step's batch, from the model without DDP.
        """
        parameters = list(self._model.parameters())
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        self._corrected = gradient.add_(self._flat())

    def after(self, tolerance: float) -> Check:
        """Return what the step showed; gradients must still be those of it."""
        assert self._corrected is not None
        sent = self._corrected.sub_(self._flat()).double()
        parts = [p.grad for p in self._model.parameters() if p.grad is not None]
        mean = torch.cat([g.flatten() for g in parts]).double()
        draw = torch.Generator().manual_seed(self._step)
        against = torch.randn(len(sent), generator=draw).double()
        return Check(
            self._step,
            checksum(self._model),
            _finite(float(sent @ against)),
            _finite(float(sent.norm())),
            _finite(float(mean @ against)),
            tolerance,
        )

    def _flat(self) -> Tensor:
        held = self._residuals()
        return torch.cat(
            [
                held[name].flatten() if name in held else torch.zeros(parameter.numel())
                for name, parameter in self._model.named_parameters()
            ]
        )


def in_sync(records: Sequence[RankRecord]) -> tuple[int, int]:
    """Return at how many sampled steps all ranks had equal parameters, and of how many."""
    every = list(zip(*(record.checks for record in records), strict=True))
    return sum(len({one.digest for one in step}) == 1 for step in every), len(every)


def conserved(records: Sequence[RankRecord]) -> tuple[int, int]:
    """Return at how many sampled steps nothing was lost, and of how many that can be judged."""
    kept = total = 0
    for step in zip(*(record.checks for record in records), strict=True):
        tolerance = min(one.tolerance for one in step)
        if tolerance >= 0:
            total += 1
            error = abs(statistics.fmean(one.sent for one in step) - step[0].mean)
            kept += error <= tolerance * statistics.fmean(one.size for one in step)
    return kept, total


def _finite(value: float) -> float:
    """Return a value that JSON can hold; 1e300 stands for what no training should give."""
    return value if math.isfinite(value) else 1e300

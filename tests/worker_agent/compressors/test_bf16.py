from __future__ import annotations

import torch

from gradpilot.protos.messages import BF16
from gradpilot.worker_agent.compressors.bf16 import Bf16
from gradpilot.worker_agent.testing import CompressorConformance
from gradpilot.worker_agent.virtual import virtual_step


class TestBf16(CompressorConformance):
    compressors = (Bf16(),)
    dense = compressors
    tolerance = 2e-2


def test_largest_fp32_values_stay_finite() -> None:
    # A plain cast rounds them to infinity.
    largest = torch.finfo(torch.float32).max
    for world_size in (1, 2, 8):
        step = virtual_step(BF16, [torch.tensor([largest, -largest])] * world_size)
        assert step.mean.isfinite().all()


def test_small_values_survive() -> None:
    mean = virtual_step(BF16, [torch.full((4,), 2.0**-30)] * 4).mean
    assert torch.equal(mean, torch.full((4,), 2.0**-30))

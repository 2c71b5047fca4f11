from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.compressors._sixteen_bit import largest_part
from gradpilot.worker_agent.compressors.fp16 import Fp16
from gradpilot.worker_agent.compressors.sent import dense_sent
from gradpilot.worker_agent.testing import (
    CompressorConformance,
    average,
    gradients,
    relative_error,
    same_bits,
)
from gradpilot.worker_agent.virtual import virtual_step

FP16 = Option(compressor="fp16")


class TestFp16(CompressorConformance):
    compressors = (Fp16(),)
    dense = compressors
    tolerance = 2e-3


def test_sum_of_large_gradients_stays_finite() -> None:
    mean = virtual_step(FP16, [torch.full((64,), 3e4) for _ in range(4)]).mean
    assert torch.equal(mean, torch.full((64,), 3e4))


@pytest.mark.parametrize(
    ("world_size", "collective"),
    [(n, "native") for n in (1, 2, 3, 8, 100, 1024)] + [(n, "ring") for n in (1, 2, 3, 8, 100)],
)
def test_values_beyond_the_range_are_clamped_and_kept(world_size: int, collective: str) -> None:
    option = Option(compressor="fp16", collective=collective)
    step = virtual_step(option, [torch.tensor([1e6, -1e6, 65504.0])] * world_size)
    assert step.mean.isfinite().all()
    limit = world_size * largest_part(torch.float16, world_size)
    assert step.mean[0] == -step.mean[1] > 0.9 * limit
    assert (step.residuals[0][:2].abs() > 9e5).all()


def test_tiny_values_wait_in_the_residual_until_they_count() -> None:
    residuals = [torch.zeros(1)] * 2
    arrived = torch.zeros(1)
    for number in range(100):
        step = virtual_step(FP16, [torch.tensor([1e-9])] * 2, residuals, step=number)
        residuals = step.residuals
        arrived += step.mean
    assert arrived > 0
    assert arrived + residuals[0] == pytest.approx(1e-7, rel=1e-5)


@pytest.mark.parametrize("compressor", ["fp16", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 8, 13])
def test_identity_is_exact_over_the_whole_range(compressor: str, world_size: int) -> None:
    generator = torch.Generator().manual_seed(world_size)
    exponents = torch.randint(-40, 24, (20_000,), generator=generator)
    values = torch.ldexp(torch.randn(20_000, generator=generator), exponents)
    step = virtual_step(Option(compressor=compressor), [values] * world_size)
    for estimate, residual in zip(step.estimates, step.residuals, strict=True):
        assert torch.equal(dense_sent(estimate.sent, values) + residual, values)


@pytest.mark.parametrize(("compressor", "expected"), [("fp16", 2.5e-7), ("bf16", 1.6e-5)])
def test_error_of_eight_workers(compressor: str, expected: float) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(100_000, generator=generator) for _ in range(8)]
    mean = virtual_step(Option(compressor=compressor), grads).mean
    vnmse = relative_error(mean, average(grads)) ** 2
    assert expected / 2 < vnmse < expected * 2


@pytest.mark.parametrize("compressor", ["fp16", "bf16"])
def test_bucket_in_the_wire_dtype_is_averaged_as_it_is(compressor: str) -> None:
    dtype = torch.float16 if compressor == "fp16" else torch.bfloat16
    grads = gradients(4097, 4, dtype=dtype)
    step = virtual_step(Option(compressor=compressor), grads)
    assert same_bits(step.mean, virtual_step(Option(), grads).mean)
    assert not any(r.any() for r in step.residuals)


@pytest.mark.parametrize("compressor", ["fp16", "bf16"])
def test_costs_no_accuracy_and_half_the_bytes(compressor: str) -> None:
    dense_loss, dense_bytes = train(Option())
    loss, sent_bytes = train(Option(compressor=compressor))
    assert loss == pytest.approx(dense_loss, rel=0.01)
    assert 2 * sent_bytes == dense_bytes


def train(option: Option) -> tuple[float, int]:
    """Fit a linear classifier on 8 virtual ranks; return its loss and the bytes a rank sent."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(32, 4, generator=generator)
    inputs = torch.randn(8, 64, 32, generator=generator)
    labels = (inputs @ truth + torch.randn(8, 64, 4, generator=generator)).argmax(-1)
    weights = torch.zeros(32, 4, requires_grad=True)
    residuals, sent = [torch.zeros(128) for _ in inputs], 0

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ weights, y)

    for number in range(40):
        grads = [
            torch.autograd.grad(loss_of(x, y), weights)[0].reshape(-1)
            for x, y in zip(inputs, labels, strict=True)
        ]
        step = virtual_step(option, grads, residuals, step=number)
        residuals = step.residuals
        sent += sum(r.bytes for r in step.wire)
        with torch.no_grad():
            weights -= step.mean.view(32, 4)
    return float(loss_of(inputs.flatten(0, 1), labels.flatten()).detach()), sent

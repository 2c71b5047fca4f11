from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting
from gradpilot.worker_agent.compressors.base import create
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.compressors.topk import TopK
from gradpilot.worker_agent.testing import (
    CompressorConformance,
    average,
    dense_sent,
    gradients,
    relative_error,
)
from gradpilot.worker_agent.virtual import virtual_step


class TestTopK(CompressorConformance):
    compressors = (TopK(ratio=0.01), TopK(ratio=0.3))
    dense = (TopK(ratio=1.0),)


def option(ratio: float) -> Option:
    return Option(compressor="topk", ratio=ratio, collective="allgather")


def test_sends_the_own_largest_elements_unchanged() -> None:
    grads = gradients(1000, 3)
    for grad, estimate in zip(grads, virtual_step(option(0.05), grads).estimates, strict=True):
        assert isinstance(estimate.sent, Sparse)
        assert torch.equal(estimate.sent.values, grad[estimate.sent.indices])
        order = grad.abs().sort(descending=True).indices[:50]
        assert set(estimate.sent.indices.tolist()) == set(order.tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2, 3, 64, 1001])
def test_values_keep_their_dtype_on_the_wire(dtype: torch.dtype, n: int) -> None:
    # Odd k and every width: values and indices must stay aligned within a message.
    for ratio in (0.01, 0.34, 1.0):
        grads = gradients(n, 3, dtype=dtype)
        step = virtual_step(option(ratio), grads)
        expected = average(
            [dense_sent(e.sent, g) for e, g in zip(step.estimates, grads, strict=True)]
        )
        assert relative_error(step.mean, expected) <= torch.finfo(dtype).eps


def test_sixteen_bit_sum_does_not_overflow() -> None:
    mean = virtual_step(option(0.5), [torch.full((8,), 6e4).half()] * 4).mean
    assert mean.isfinite().all()
    assert mean[:4].tolist() == [60000.0] * 4


def test_sixteen_bit_values_are_averaged_precisely() -> None:
    # Rounding in fp32 first moves a few elements in 500 to the other neighbour; dividing or adding
    # in 16 bits moves more than a hundred.
    grads = gradients(500, 3, dtype=torch.float16)
    mean = virtual_step(option(1.0), grads).mean
    assert (mean != average(grads).half()).sum() <= 5
    grads = [torch.tensor([value]).half() for value in (2048.0, 1.0, 1.0, 1.0)]
    assert virtual_step(option(1.0), grads).mean.item() == 513.0  # 512.75


def test_ranks_that_agree_on_places_are_added_once_each() -> None:
    grads = [torch.tensor([3.0, 0.0, 1.0]), torch.tensor([6.0, 1.0, 0.0])]
    assert virtual_step(option(0.4), grads).mean.tolist() == [4.5, 0.0, 0.0]


def test_residual_brings_every_element_through() -> None:
    n, residuals, arrived = 64, [torch.zeros(64)], torch.zeros(64)
    grad = torch.linspace(0.1, 1.0, n)
    for number in range(200):
        step = virtual_step(option(0.05), [grad], residuals, step=number)
        residuals, arrived = step.residuals, arrived + step.mean
    assert (arrived > 0).all()


def test_many_ranks() -> None:
    grads = gradients(64, 256)
    step = virtual_step(option(0.1), grads)
    sent = [dense_sent(e.sent, g) for e, g in zip(step.estimates, grads, strict=True)]
    assert relative_error(step.mean, average(sent)) < 1e-5


def gain(x: Tensor, ratio: float) -> float:
    sent = virtual_step(option(ratio), [x]).estimates[0].sent
    assert isinstance(sent, Sparse)
    return float(sent.values.double().square().sum() / x.double().square().sum())


def test_gain_of_known_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(1_000_000, generator=generator)
    laplace = torch.empty(1_000_000).exponential_(generator=generator)
    expected = {0.1: (0.4393, 0.5954), 0.01: (0.0845, 0.1621), 0.001: (0.0127, 0.0318)}
    previous = (1.0, 1.0)
    for (ratio, values), tolerance in zip(expected.items(), (0.01, 0.03, 0.10), strict=True):
        gains = (gain(gauss, ratio), gain(laplace, ratio))
        assert gains == pytest.approx(values, rel=tolerance)
        assert 0.0 < gains[0] < previous[0] <= 1.0
        assert 0.0 < gains[1] < previous[1] <= 1.0
        previous = gains


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, math.nan, math.inf])
def test_refuses_a_ratio_out_of_bounds(ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"topk: setting ratio must be a number in \(0, 1\]"):
        TopK(ratio=ratio)


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="no setting 'selection'"):
        create(
            Option("topk", 0.1, "allgather", settings=(Setting("selection", "star"),)),
        )
    with pytest.raises(
        ConfigError, match="can be carried by allgather, hierarchical, got 'native'"
    ):
        create(Option("topk", 0.1, "native"))
    with pytest.raises(ConfigError, match=r"2147483648 elements.*at most 2\*\*31 - 1"):
        TopK().wire(1 << 31)
    assert TopK(ratio=0.001).wire((1 << 31) - 1)[0].bytes == 8 * 2147483

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.compressors.onebit import OneBit
from gradpilot.worker_agent.compressors.sent import dense_sent
from gradpilot.worker_agent.testing import CompressorConformance, gradients
from gradpilot.worker_agent.virtual import virtual_step

OPTION = Option("onebit", collective="allgather")


class TestOneBit(CompressorConformance):
    compressors = (OneBit(),)
    # Means are no multiples of the gradient's last bit.
    exact = False


def sent_of(grad: Tensor) -> Tensor:
    sent = virtual_step(OPTION, [grad]).estimates[0].sent
    return dense_sent(sent, grad)


vectors = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40)


@given(vectors)
@settings(deadline=None, max_examples=100)
def test_preserves_the_sum_and_loses_the_variance_within(elements: list[float]) -> None:
    grad = torch.tensor(elements)
    exact, sent = grad.double(), sent_of(grad).double()
    size = float(exact.abs().sum()) + 1e-30
    assert abs(float(sent.sum() - exact.sum())) <= 1e-6 * size
    within = torch.zeros((), dtype=torch.float64)
    for group in (exact < 0, exact >= 0):
        if group.any():
            within += (exact[group] - exact[group].mean()).square().sum()
            assert abs(float(sent[group].sum() - exact[group].sum())) <= 2e-6 * size
    left = (exact - sent).square().sum()
    assert float(left) == pytest.approx(float(within), rel=1e-4, abs=1e-8 * size**2)


def test_two_values() -> None:
    sent = sent_of(torch.tensor([-1.0, 2.0, -3.0, 4.0, 0.0]))
    assert sent.tolist() == [-2.0, 2.0, -2.0, 2.0, 2.0]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_group_may_be_empty(sign: float) -> None:
    assert sent_of(sign * torch.tensor([1.0, 2.0, 3.0])).tolist() == [2.0 * sign] * 3


def test_a_small_group_is_as_precise_as_a_large_one() -> None:
    # From the sums of elements and of magnitudes, one element's mean would be off by percents.
    grad = torch.full((100_000,), 1.0).add_(torch.rand(100_000).mul_(0.1))
    grad[17] = -1e-3
    assert float(sent_of(grad)[17]) == pytest.approx(-1e-3, rel=1e-3)


def test_gain_of_normal_elements() -> None:
    normal = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    gain = sent_of(normal).square().sum() / normal.square().sum()
    assert float(gain) == pytest.approx(2 / math.pi, rel=0.01)
    assert OneBit.gain_factor == pytest.approx(2 / math.pi, rel=0.01)


def test_mean_over_ranks() -> None:
    grads = gradients(333, 4)
    expected = torch.zeros(333, dtype=torch.float64)
    for grad in grads:
        negative = grad < 0
        exact = grad.double()
        expected += torch.where(negative, exact[negative].mean(), exact[~negative].mean()) / 4
    mean = virtual_step(OPTION, grads).mean
    assert torch.allclose(mean.double(), expected, rtol=1e-4, atol=1e-5)


def test_one_bit_an_element() -> None:
    assert OneBit().wire(10_000_000)[0].bytes == 1_250_008
    assert [OneBit().wire(n)[0].bytes for n in (1, 32, 33)] == [12, 12, 16]

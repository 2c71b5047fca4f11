from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.worker_agent.compressors.base import option_of
from gradpilot.worker_agent.compressors.sent import dense_sent
from gradpilot.worker_agent.compressors.terngrad import TernGrad
from gradpilot.worker_agent.testing import CompressorConformance, gradients, relative_error
from gradpilot.worker_agent.virtual import virtual_step


class TestTernGrad(CompressorConformance):
    compressors = TernGrad.ladder()
    # A scale is no multiple of the gradient's last bit.
    exact = False


def sent_of(grad: Tensor, step: int = 0, clip: float = 2.5) -> Tensor:
    compressor = TernGrad(clip=clip)
    result = virtual_step(option_of(compressor, "allgather"), [grad], step=step)
    sent = result.estimates[0].sent
    return dense_sent(sent, grad)


def limit_of(grad: Tensor, clip: float = 2.5) -> float:
    return clip * float(grad.double().square().mean().sqrt())


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40).filter(
        lambda x: max(map(abs, x)) > 1e-6
    ),
    st.integers(0, 9),
)
@settings(deadline=None, max_examples=100)
def test_three_values(elements: list[float], step: int) -> None:
    grad = torch.tensor(elements)
    scale = min(float(grad.abs().max()), limit_of(grad))
    sent = sent_of(grad, step)
    for element, one in zip(elements, sent.tolist(), strict=True):
        assert one == 0.0 or abs(one) == pytest.approx(scale, rel=1e-5)
        assert one * element >= 0.0
        # What is clipped, or the largest, is sent for certain.
        if abs(element) >= scale * (1 + 1e-5):
            assert one != 0.0


@pytest.mark.parametrize("clip", [1.5, 2.5, 1e6])
def test_unbiased_after_clipping(clip: float) -> None:
    grad = gradients(500, 1)[0]
    scale = min(float(grad.abs().max()), limit_of(grad, clip))
    clipped = grad.double().clamp(-scale, scale)
    assert bool((clipped != grad).any()) is (clip < 1e6)
    draws = torch.stack([sent_of(grad, step, clip).double() for step in range(400)])
    error = float((draws.mean(0) - clipped).norm())
    # Variance of each element is |g| (s - |g|).
    deviation = float((clipped.abs() * (scale - clipped.abs())).clamp(min=0).sum().sqrt())
    assert error == pytest.approx(deviation / math.sqrt(400), rel=0.2)
    if clip < 1e6:
        assert float((draws.mean(0) - grad).norm()) > 3 * error


def test_probability_is_the_magnitude_over_the_scale() -> None:
    grad = torch.full((50_000,), 0.3)
    grad[0] = 1.0
    share = float((sent_of(grad, clip=1e6) != 0).double().mean())
    assert share == pytest.approx(0.3, abs=0.01)


def test_equal_elements_are_not_clipped_to_nothing() -> None:
    # Their deviation about the mean is zero.
    assert sent_of(torch.full((100,), 0.7)).tolist() == pytest.approx([0.7] * 100)
    assert sent_of(torch.tensor([-3.0])).tolist() == [-3.0]


def test_what_was_clipped_waits_in_the_residual() -> None:
    grad = torch.full((1000,), 0.01)
    grad[0] = 1.0
    scale = limit_of(grad)
    step = virtual_step(option_of(TernGrad(), "allgather"), [grad])
    assert float(step.residuals[0][0]) == pytest.approx(1.0 - scale, rel=1e-5)


def test_tighter_clipping_keeps_residuals_short() -> None:
    lengths = {}
    for clip in (1.5, 2.5):
        compressor, residuals = TernGrad(clip=clip), [torch.zeros(2048)]
        for number in range(100):
            generator = torch.Generator().manual_seed(number)
            grad = torch.randn(2048, generator=generator)
            step = virtual_step(option_of(compressor, "allgather"), [grad], residuals, step=number)
            residuals = step.residuals
        lengths[clip] = float(residuals[0].norm()) / math.sqrt(2048)
    assert lengths[1.5] < 1.2
    assert lengths[2.5] > 5 * lengths[1.5]


def test_noise_differs_between_ranks_and_averages_out() -> None:
    grad = gradients(20_000, 1)[0].clamp(-2, 2)
    option = option_of(TernGrad(clip=1e6), "allgather")
    one = relative_error(virtual_step(option, [grad]).mean, grad)
    sixteen = relative_error(virtual_step(option, [grad] * 16).mean, grad)
    assert sixteen == pytest.approx(one / 4, rel=0.1)


def test_two_bits_an_element() -> None:
    assert TernGrad().wire(10_000_000)[0].bytes == 2_500_004
    assert [TernGrad().wire(n)[0].bytes for n in (1, 16, 17)] == [8, 8, 12]


def test_refuses_to_clip_nearly_everything() -> None:
    with pytest.raises(ConfigError, match=r"clip must be a number in \[1, 1e\+06\], got 0.5"):
        TernGrad(clip=0.5)

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.compressors.efsignsgd import EfSignSgd
from gradpilot.worker_agent.compressors.sent import dense_sent
from gradpilot.worker_agent.testing import CompressorConformance, average, gradients
from gradpilot.worker_agent.virtual import virtual_step

OPTION = Option("efsignsgd", collective="allgather")


class TestEfSignSgd(CompressorConformance):
    compressors = (EfSignSgd(),)
    # A scale is no multiple of the gradient's last bit.
    exact = False


def sent_of(grad: Tensor) -> Tensor:
    sent = virtual_step(OPTION, [grad]).estimates[0].sent
    return dense_sent(sent, grad)


vectors = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40).filter(
    lambda x: max(map(abs, x)) > 1e-6
)


@given(vectors)
@settings(deadline=None, max_examples=100)
def test_contraction_is_what_theory_says(elements: list[float]) -> None:
    grad = torch.tensor(elements)
    exact, sent = grad.double(), sent_of(grad).double()
    left = (exact - sent).square().sum() / exact.square().sum()
    expected = 1 - exact.abs().sum() ** 2 / (len(elements) * exact.square().sum())
    assert float(left) == pytest.approx(float(expected), abs=1e-6)
    assert float(sent.abs().sum()) == pytest.approx(float(exact.abs().sum()), rel=1e-6)


def test_signs_are_kept_and_magnitudes_are_one() -> None:
    grad = gradients(1001, 1)[0]
    sent = sent_of(grad)
    assert torch.equal(sent.sign(), grad.sign())
    assert bool((sent.abs() == sent[0].abs()).all())


def test_gain_of_normal_and_of_single_elements() -> None:
    normal = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    gain = sent_of(normal).square().sum() / normal.square().sum()
    assert float(gain) == pytest.approx(2 / math.pi, rel=0.01)
    assert EfSignSgd.gain_factor == pytest.approx(2 / math.pi, rel=0.01)
    single = torch.zeros(50)
    single[7] = 3.0
    assert float(sent_of(single).square().sum()) == pytest.approx(9.0 / 50)


def test_scale_of_the_gradient_passes_through() -> None:
    grad = gradients(100, 1)[0]
    assert torch.equal(sent_of(4 * grad), 4 * sent_of(grad))


def test_ranks_have_scales_of_their_own() -> None:
    grads = [torch.tensor([1.0, -3.0]), torch.tensor([10.0, 10.0])]
    assert virtual_step(OPTION, grads).mean.tolist() == [6.0, 4.0]


def test_feedback_serves_what_signs_cannot_tell() -> None:
    # One large and one small element: signs alone would move both alike, for ever.
    grad = torch.tensor([1.0, 0.01])
    residuals, arrived = [torch.zeros(2)], torch.zeros(2)
    for number in range(200):
        step = virtual_step(OPTION, [grad], residuals, step=number)
        residuals, arrived = step.residuals, arrived + step.mean
    assert torch.allclose(arrived / 200, grad, atol=0.01)


def test_one_bit_an_element() -> None:
    assert EfSignSgd().wire(10_000_000)[0].bytes == 1_250_004
    assert [EfSignSgd().wire(n)[0].bytes for n in (1, 32, 33)] == [8, 8, 12]


def test_the_sum_over_ranks_is_that_of_their_scaled_signs() -> None:
    grads = gradients(77, 5)
    step = virtual_step(OPTION, grads)
    expected = average([g.double().abs().mean() * g.sign() for g in grads])
    assert torch.allclose(step.mean.double(), expected, rtol=1e-5, atol=1e-6)

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.compressors.natural import Natural
from gradpilot.worker_agent.compressors.sent import dense_sent
from gradpilot.worker_agent.testing import CompressorConformance, gradients, relative_error
from gradpilot.worker_agent.virtual import virtual_step

OPTION = Option("natural", collective="allgather")


class TestNatural(CompressorConformance):
    compressors = (Natural(),)
    # An element less a power of two may need a bit more than either.
    exact = False


def sent_of(grad: Tensor, step: int = 0) -> Tensor:
    sent = virtual_step(OPTION, [grad], step=step).estimates[0].sent
    return dense_sent(sent, grad)


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40), st.integers(0, 9)
)
@settings(deadline=None, max_examples=150)
def test_sends_a_power_of_two_next_to_the_element(elements: list[float], step: int) -> None:
    grad = torch.tensor(elements)
    largest = max(map(abs, elements))
    for element, sent in zip(grad.tolist(), sent_of(grad, step).tolist(), strict=True):
        if abs(element) < largest * 2.0**-120 or abs(element) < 2.0**-126:
            assert abs(sent) <= max(largest * 2.0**-119, 2.0**-126)
            continue
        fraction, exponent = math.frexp(abs(element))
        below = 2.0 ** (exponent - 1)
        assert abs(sent) in ((below,) if fraction == 0.5 else (below, 2 * below))
        assert math.copysign(1.0, sent) == math.copysign(1.0, element)


def test_powers_of_two_and_zero_are_exact() -> None:
    exponents = torch.arange(-60.0, 60.0)
    grad = torch.cat([torch.exp2(exponents), -torch.exp2(exponents), torch.zeros(3)])
    for step in range(5):
        assert torch.equal(sent_of(grad, step), grad)


def test_probability_is_the_mantissa() -> None:
    # Copies of one value within a block of noise are rounded independently.
    copies = 50_000
    for value in (1.1, -1.5, 1.9, 3e-20, -7e15):
        sent = sent_of(torch.full((copies,), value))
        below = 2.0 ** (math.frexp(abs(value))[1] - 1)
        up = float((sent.abs() > 1.5 * below).double().mean())
        expected = abs(value) / below - 1.0
        assert up == pytest.approx(expected, abs=5 * math.sqrt(0.25 / copies))
        assert float(sent.double().mean()) == pytest.approx(value, rel=0.01)


def test_variance_is_at_most_an_eighth() -> None:
    # Of 4/3 exactly an eighth: mantissa 1/3, error variance 2/9, square 16/9.
    worst = torch.full((50_000,), 4.0 / 3.0)
    error = (sent_of(worst) - worst).double().square().sum() / worst.double().square().sum()
    assert float(error) == pytest.approx(1 / 8, rel=0.02)
    grad = gradients(50_000, 1)[0]
    exact = grad.double()
    mantissa, exponent = torch.frexp(exact.abs())
    fraction = 2 * mantissa - 1
    variance = (fraction * (1 - fraction) * torch.exp2(2.0 * (exponent - 1))).sum()
    errors = [(sent_of(grad, step).double() - exact).square().sum() for step in range(10)]
    measured = torch.stack(errors).mean()
    assert float(measured) == pytest.approx(float(variance), rel=0.05)
    assert float(measured) <= float(exact.square().sum()) / 8


def test_no_error_exceeds_its_element() -> None:
    grad = gradients(10_000, 1)[0]
    assert bool(((sent_of(grad) - grad).abs() <= grad.abs()).all())


def test_the_ends_of_the_range() -> None:
    # Ordinary gradients: every fp32 down to the least normal number, and below it without bias.
    tiny = 2.0**-126
    grad = torch.tensor([0.75, tiny, -3 * tiny, tiny / 4])
    for step in range(20):
        sent = sent_of(grad, step).tolist()
        assert sent[1] == tiny
        assert sent[2] in (-2 * tiny, -4 * tiny)
        assert sent[3] in (0.0, tiny)
    # Large ones: the range moves up, and no power of two lies above 2^127.
    top = sent_of(torch.tensor([3e38, 2.0**100, 2.0**-10]))
    assert top.tolist() == [2.0**127, 2.0**100, 0.0]
    # fp64 beyond fp32: what cannot be said stays behind.
    beyond = virtual_step(OPTION, [torch.tensor([1e300, 1.0], dtype=torch.float64)])
    assert float(beyond.mean[0]) == 2.0**127
    assert float(beyond.residuals[0][0]) == 1e300 - 2.0**127


def test_noise_differs_between_ranks_and_averages_out() -> None:
    grad = gradients(20_000, 1)[0]
    one = relative_error(virtual_step(OPTION, [grad]).mean, grad)
    sixteen = relative_error(virtual_step(OPTION, [grad] * 16).mean, grad)
    assert sixteen == pytest.approx(one / 4, rel=0.1)


def test_one_byte_an_element() -> None:
    assert Natural().wire(10_000_000)[0].bytes == 10_000_004
    assert [Natural().wire(n)[0].bytes for n in (1, 4, 5)] == [8, 8, 12]

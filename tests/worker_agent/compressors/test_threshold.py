from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, WireRound
from gradpilot.worker_agent.compressors.base import option_of
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.compressors.threshold import Threshold, root_mean_square
from gradpilot.worker_agent.testing import SIZES, Case, CompressorConformance, gradients
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step


class TestThreshold(CompressorConformance):
    compressors = (Threshold(), Threshold(threshold=2.0, unit="absolute"))
    dense = (Threshold(threshold=0.0), Threshold(threshold=0.0, unit="absolute"))

    def test_wire_formula_is_what_is_handed_in(self, case: Case, world_size: int) -> None:
        """Lengths, then 8 bytes for each element of the rank that sends most."""
        for n in SIZES:
            step = self.step(case, gradients(n, world_size))
            assert step.wire == rounds_of(counts(step))


def counts(step: VirtualStep) -> list[int]:
    """Return how many elements every rank sent."""
    sent = [e.sent for e in step.estimates]
    assert all(isinstance(s, Sparse) for s in sent)
    return [s.indices.numel() for s in sent if isinstance(s, Sparse)]


def rounds_of(selected: list[int]) -> tuple[WireRound, ...]:
    lengths = WireRound("all_gather", 8)
    return (lengths, WireRound("all_gather", 8 * max(selected))) if max(selected) else (lengths,)


def option(threshold: float, unit: str) -> Option:
    return option_of(Threshold(threshold=threshold, unit=unit), "allgather")


@given(
    values=st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=50),
    threshold=st.floats(0, 11, width=32),
)
@settings(deadline=None, max_examples=100)
def test_what_is_left_behind_is_below_the_threshold(values: list[float], threshold: float) -> None:
    grad = torch.tensor(values)
    step = virtual_step(option(threshold, "absolute"), [grad])
    assert bool((step.residuals[0].abs() < max(threshold, 1e-45)).all())
    sent = step.estimates[0].sent
    assert isinstance(sent, Sparse)
    assert bool((sent.values.abs() >= threshold).all())
    assert bool((sent.values != 0).all())


def test_ranks_send_what_they_have_and_one_has_nothing() -> None:
    grads = [torch.tensor([3.0, -4.0, 1.0]), torch.tensor([0.5, 0.2, 0.0]), torch.zeros(3)]
    step = virtual_step(option(2.0, "absolute"), grads)
    assert counts(step) == [2, 0, 0]
    torch.testing.assert_close(step.mean, torch.tensor([1.0, -4 / 3, 0.0]))
    assert step.wire == rounds_of([2])
    assert step.residuals[1].tolist() == grads[1].tolist()


def test_nobody_has_anything() -> None:
    step = virtual_step(option(2.0, "absolute"), [torch.ones(5)] * 3)
    assert not step.mean.any()
    assert step.wire == (WireRound("all_gather", 8),)
    assert all(r.tolist() == [1.0] * 5 for r in step.residuals)


def test_what_waits_is_sent_when_it_adds_up() -> None:
    residuals = [torch.zeros(4)]
    arrived = []
    for number in range(6):
        step = virtual_step(option(2.0, "absolute"), [torch.ones(4)], residuals, step=number)
        residuals = step.residuals
        arrived.append(float(step.mean[0]))
    assert arrived == [0.0, 2.0] * 3


def test_relative_share_of_known_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(1_000_000, generator=generator)
    laplace = torch.empty(1_000_000).exponential_(generator=generator)
    for t in (1.0, 2.0, 3.0):
        step = virtual_step(option(t, "rms"), [gauss, laplace])
        expected = [math.erfc(t / math.sqrt(2)), math.exp(-math.sqrt(2) * t)]
        assert [c / 1_000_000 for c in counts(step)] == pytest.approx(expected, rel=0.05)
        stated = Threshold(threshold=t).wire(1_000_000)
        assert stated[1].bytes == pytest.approx(8 * counts(step)[1], rel=0.05)


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e30])
def test_relative_selection_does_not_depend_on_the_scale(factor: float) -> None:
    grads = gradients(1000, 2)
    plain = virtual_step(option(2.0, "rms"), grads)
    scaled = virtual_step(option(2.0, "rms"), [g * factor for g in grads])
    for a, b in zip(plain.estimates, scaled.estimates, strict=True):
        assert isinstance(a.sent, Sparse)
        assert isinstance(b.sent, Sparse)
        assert torch.equal(a.sent.indices, b.sent.indices)


@pytest.mark.parametrize("x", [torch.full((9,), 3e30), torch.full((9,), 1e-30), torch.zeros(3)])
def test_root_mean_square_neither_overflows_nor_vanishes(x: Tensor) -> None:
    assert root_mean_square(x) == pytest.approx(float(x[0]), rel=1e-6)


@pytest.mark.parametrize("unit", ["rms", "absolute"])
def test_a_gradient_that_is_not_finite_costs_one_element(unit: str) -> None:
    grads = [torch.full((1000,), math.nan), torch.zeros(1000)]
    step = virtual_step(option(2.0, unit), grads)
    assert not bool(step.mean.isfinite().all())
    assert step.wire == rounds_of([1])


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="unit must be one of rms, absolute"):
        Threshold(unit="largest")
    with pytest.raises(ConfigError, match="threshold must be a number"):
        Threshold(threshold=-1.0)
    assert Threshold(threshold=9.0, unit="absolute").wire(100)[1].bytes == 800

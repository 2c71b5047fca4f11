from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.worker_agent.compressors.base import Compressor, option_of
from gradpilot.worker_agent.compressors.qsgd import Qsgd
from gradpilot.worker_agent.testing import (
    CompressorConformance,
    dense_sent,
    gradients,
    relative_error,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step
from tests.ranks import run_ranks
from tests.worker_agent import training


class TestQsgd(CompressorConformance):
    compressors = (
        Qsgd(levels=7, span=50),
        Qsgd(levels=15, norm="max", exchange="all_reduce"),
    )
    # A level is no multiple of the gradient's last bit.
    exact = False
    seeds = 200


def run(
    compressor: Compressor,
    grads: list[Tensor],
    step: int = 0,
    residuals: list[Tensor] | None = None,
) -> VirtualStep:
    carrier = compressor.collectives[0]
    return virtual_step(
        option_of(compressor, carrier), grads, residuals, step=step, compressor=compressor
    )


def sent_of(compressor: Compressor, grad: Tensor, step: int = 0) -> Tensor:
    return dense_sent(run(compressor, [grad], step).estimates[0].sent, grad)


def norms_of(compressor: Qsgd, grad: Tensor) -> Tensor:
    """Return the norm that serves each element."""
    exact = grad.double()
    order = 2 if compressor.norm == "l2" else math.inf
    spans = torch.split(exact, compressor.span)
    return torch.cat([torch.full_like(x, float(torch.linalg.vector_norm(x, order))) for x in spans])


@given(
    st.integers(1, 200),
    st.integers(16, 70),
    st.integers(5, 127),
    st.sampled_from(["l2", "max"]),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=50)
def test_sends_one_of_the_two_levels_around(
    n: int, span: int, levels: int, norm: str, seed: int
) -> None:
    compressor = Qsgd(levels=levels, span=span, norm=norm)
    grad = gradients(n, 1, seed=seed)[0]
    unit = norms_of(compressor, grad) / levels
    level = sent_of(compressor, grad, seed).double() / unit
    assert bool(((level - level.round()).abs() < 1e-4).all())
    assert bool(((level - grad.double() / unit).abs() < 1 + 1e-4).all())
    assert bool((level.abs() < levels + 1e-4).all())


@pytest.mark.parametrize("exchange", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize(("levels", "d"), [(4, 64), (8, 256), (16, 512), (127, 512)])
def test_variance(levels: int, d: int, norm: str, exchange: str) -> None:
    # One span of d elements; normal ones, and those that are worst for l2: all equally large.
    generator = torch.Generator().manual_seed(d)
    for grad in (torch.randn(d, generator=generator), torch.ones(d)):
        compressor = Qsgd(levels=levels, span=d, norm=norm, exchange=exchange)
        exact = grad.double()
        unit = norms_of(compressor, grad) / levels
        fraction = (exact / unit).abs() % 1.0
        # A hair below a whole number is the whole number.
        fraction = torch.where(fraction > 1 - 1e-6, 0.0, fraction)
        variance = float((unit.square() * fraction * (1 - fraction)).sum())
        energy = float(exact.square().sum())
        assert variance <= min(d / levels**2, math.sqrt(d) / levels) * energy
        assert variance <= d / (4 * levels**2) * energy
        errors = [
            (sent_of(compressor, grad, step).double() - exact).square().sum() for step in range(100)
        ]
        measured = float(torch.stack(errors).mean())
        assert measured == pytest.approx(variance, rel=0.1, abs=1e-6 * energy)


def test_spans_have_norms_of_their_own() -> None:
    # An outlier makes its own span coarse and no other.
    grad = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    grad[700] = 1e6
    compressor = Qsgd(span=128)
    error = (sent_of(compressor, grad) - grad).abs()
    calm = torch.ones(1024, dtype=torch.bool)
    calm[640:768] = False
    assert relative_error((grad + error)[calm], grad[calm]) < 0.1
    assert float(error[~calm].max()) > 0.5


@pytest.mark.parametrize(("levels", "bits"), [(1, 2), (2, 4), (7, 4), (8, 8), (127, 8)])
def test_wire(levels: int, bits: int) -> None:
    compressor = Qsgd(levels=levels, norm="max", span=500)
    assert compressor.wire(10_000)[0].bytes == 4 * 20 + 10_000 * bits // 8
    assert compressor.wire(10_001)[0].bytes == 4 * 21 + -(-10_001 * bits // 32) * 4
    assert Qsgd(span=1 << 16, norm="max").wire(100)[0].bytes == 4 + 100


def test_all_reduce_agrees_on_the_largest_norm() -> None:
    compressor = Qsgd(levels=15, span=64, norm="max", exchange="all_reduce")
    grads = gradients(300, 3)
    step = run(compressor, grads)
    norms = torch.stack([norms_of(compressor, g) for g in grads]).amax(0)
    for grad, estimate in zip(grads, step.estimates, strict=True):
        level = dense_sent(estimate.sent, grad).double() * 15 / norms
        assert bool(((level - level.round()).abs() < 1e-4).all())
    assert [r.collective for r in step.wire] == ["all_reduce", "all_reduce"]
    assert not any(r.skippable for r in step.wire)


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_both_exchanges_round_alike_where_norms_agree(norm: str) -> None:
    grad = gradients(700, 1)[0]
    grads = [grad, -grad, grad.flip(0).clone()[torch.arange(699, -1, -1)]]
    for span in (64, 512):
        gathered = run(Qsgd(levels=32, span=span, norm=norm), grads)
        summed = run(Qsgd(levels=32, span=span, norm=norm, exchange="all_reduce"), grads)
        assert relative_error(gathered.mean, summed.mean) < 1e-5
        for one, other in zip(gathered.residuals, summed.residuals, strict=True):
            assert relative_error(one, other) < 1e-4


def test_codes_of_most_ranks_add_up() -> None:
    # 127 levels in total: every rank at its largest level.
    compressor = Qsgd(levels=1, norm="max", exchange="all_reduce")
    assert run(compressor, [torch.full((40,), -2.0)] * 127).mean.tolist() == (
        pytest.approx([-2.0] * 40)
    )


def test_residuals_stay_bounded_on_the_ladder() -> None:
    n = 2048
    for compressor in Qsgd.ladder():
        residuals = [torch.zeros(n), torch.zeros(n)]
        for number in range(60):
            grads = gradients(n, 2, seed=number)
            residuals = run(compressor, grads, number, residuals).residuals
        assert float(residuals[0].norm()) < float(grads[0].norm())


def test_longest_span_is_where_residuals_begin_to_grow() -> None:
    # The worst case of l2: the noise of 4 s^2 equal elements is as large as they are.
    levels, span = 4, 64
    grad = torch.ones(span)
    errors = [
        float((sent_of(Qsgd(levels=levels, span=span), grad, step) - grad).square().sum())
        for step in range(200)
    ]
    assert sum(errors) / 200 == pytest.approx(span, rel=0.1)
    with pytest.raises(ConfigError, match=r"at most 4 levels\^2 = 64 elements, got 65"):
        Qsgd(levels=levels, span=span + 1)
    assert Qsgd(levels=levels, span=span + 1, norm="max").span == 65


@pytest.mark.parametrize("exchange", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_magnitudes_whose_squares_overflow_or_vanish(norm: str, exchange: str) -> None:
    compressor = Qsgd(levels=60, norm=norm, exchange=exchange)
    for size in (3e38, 1e25, 1e-25, 1e-38, 1e-44):
        step = run(compressor, [size * torch.ones(600), torch.zeros(600)])
        assert bool(step.mean.isfinite().all()), f"{size}"
        assert all(bool(r.isfinite().all()) for r in step.residuals)
        assert bool((step.mean >= 0).all())


def test_noise_differs_between_ranks_and_averages_out() -> None:
    grad = gradients(20_000, 1)[0]
    compressor = Qsgd(levels=7, norm="max")
    one = relative_error(run(compressor, [grad]).mean, grad)
    sixteen = relative_error(run(compressor, [grad] * 16).mean, grad)
    assert sixteen == pytest.approx(one / 4, rel=0.1)


def test_refuses_what_int8_cannot_add() -> None:
    summed = Qsgd(levels=15, norm="max", exchange="all_reduce")
    summed.check(8, "native")
    with pytest.raises(ConfigError, match="at most 127, got 15 times 9"):
        summed.check(9, "native")
    Qsgd().check(1024, "allgather")


def _train(rank: int, compressor: Qsgd) -> list[tuple[bool, float, str]]:
    net = training.wrap()
    handle = training.control(net, option_of(compressor, compressor.collectives[0]))
    seen = []
    for step in range(4):
        net.zero_grad()
        training.backward(net, rank, step)
        gradient = training.gradients(net)
        finite = bool(gradient.isfinite().all())
        seen.append((finite, float(gradient.norm()), training.digest(gradient)))
    handle.close()
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("exchange", ["all_gather", "all_reduce"])
def test_over_a_process_group(exchange: str) -> None:
    first, *others = run_ranks(_train, 3, Qsgd(levels=31, exchange=exchange))
    assert all(other == first for other in others)
    assert all(finite and norm > 0.0 for finite, norm, _ in first)

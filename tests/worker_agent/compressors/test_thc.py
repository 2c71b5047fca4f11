from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting
from gradpilot.worker_agent.collectives.reduction import SUM
from gradpilot.worker_agent.collectives.saturating import SATURATING_INT8, SATURATING_NIBBLES
from gradpilot.worker_agent.compressors.base import create, option_of
from gradpilot.worker_agent.compressors.thc import Thc
from gradpilot.worker_agent.testing import (
    CompressorConformance,
    average,
    dense_sent,
    gradients,
    relative_error,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step

RANGE = 3.29719


class TestThc(CompressorConformance):
    # Sums that cannot overflow, and a rotation of everything.
    compressors = (Thc(bits=3), Thc(bits=4, stages=31))
    # A level may be far from the element that it stands for, so their difference rounds.
    exact = False


class TestSaturatingThc(CompressorConformance):
    # The second saturates at 8 ranks only.
    compressors = (Thc(bits=3, wire_bits=4), Thc(bits=6))
    exact = False
    # What saturation takes away happens between ranks, where nobody can keep it.
    conserving = False


def normals(n: int, world_size: int, correlation: float = 0.0, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n, generator=generator)
    return [
        correlation**0.5 * common + (1.0 - correlation) ** 0.5 * torch.randn(n, generator=generator)
        for _ in range(world_size)
    ]


def run(thc: Thc, grads: list[Tensor], collective: str = "ring", **more: Any) -> VirtualStep:
    return virtual_step(option_of(thc, collective), grads, compressor=thc, **more)


def vnmse(thc: Thc, grads: list[Tensor]) -> float:
    """Return the squared error of the mean over its squared norm."""
    return relative_error(run(thc, grads).mean, average(grads)) ** 2


@pytest.mark.parametrize(
    ("bits", "wire_bits", "correlation", "expected"),
    [
        (4, 4, 0.0, (0.069, 0.164, 0.351)),
        (4, 4, 0.5, (0.148, 0.389, 0.630)),
        (4, 8, 0.0, (0.037, 0.037, 0.037)),
        (4, 8, 0.5, (0.015, 0.0082, 0.0044)),
        (3, 4, 0.0, (0.201, 0.199, 0.199)),
        (3, 4, 0.5, (0.082, 0.114, 0.320)),
    ],
)
def test_what_saturation_costs(
    bits: int, wire_bits: int, correlation: float, expected: tuple[float, ...]
) -> None:
    thc = Thc(bits=bits, wire_bits=wire_bits, stages=31)
    found = [vnmse(thc, normals(1 << 16, n, correlation, seed=n)) for n in (4, 8, 16)]
    assert found == pytest.approx(list(expected), rel=0.05)


@pytest.mark.parametrize("bits", [3, 4, 5, 6])
def test_rounding_errs_as_evenly_spaced_levels_do(bits: int) -> None:
    thc = Thc(bits=bits, stages=31)
    (grad,) = normals(1 << 16, 1)
    sent = dense_sent(run(thc, [grad]).estimates[0].sent, grad)
    error = relative_error(sent, grad) ** 2
    # Clamping beyond the range costs another 1.3e-4.
    assert error == pytest.approx((RANGE / thc.levels) ** 2 / 6 + 1.3e-4, rel=0.05)


def test_finer_levels_approach_the_mean() -> None:
    grads = gradients(5000, 2)
    errors = [vnmse(Thc(bits=bits), grads) for bits in (3, 4, 5, 6, 7)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.002


def test_the_bound_admits_what_the_table_shows_to_be_safe() -> None:
    most = {(bits, wire): Thc(bits=bits, wire_bits=wire).most_ranks for bits, wire in settings()}
    assert most[3, 4] == 5
    assert most[4, 4] == 2
    assert most[4, 8] > 16
    for (bits, wire), ranks in most.items():
        thc = Thc(bits=bits, wire_bits=wire, stages=31)
        thc.check(ranks, "ring")
        with pytest.raises(ConfigError, match=f"at most {ranks} ranks, got {ranks + 1}"):
            thc.check(ranks + 1, "ring")


def settings() -> list[tuple[int, int]]:
    return [(3, 4), (4, 4), (3, 8), (4, 8), (5, 8), (6, 8), (7, 8), (8, 8)]


@pytest.mark.parametrize(("bits", "wire_bits"), [(3, 4), (4, 4), (5, 8), (6, 8), (7, 8), (8, 8)])
def test_within_the_bound_saturation_costs_two_percent(bits: int, wire_bits: int) -> None:
    thc = Thc(bits=bits, wire_bits=wire_bits, stages=31)
    ranks = thc.most_ranks
    grads = normals(1 << 14, ranks, 0.5)
    mean_square = 0.5 + 0.5 / ranks
    rounding = ((RANGE / thc.levels) ** 2 / 6 + 1.3e-4) / ranks / mean_square
    assert vnmse(thc, grads) < 1.05 * rounding + 0.022


def test_a_plain_sum_while_no_sum_can_overflow() -> None:
    thc = Thc(bits=4)
    assert thc.reduction(18) is SUM  # 18 * 7 = 126
    assert thc.reduction(19) is SATURATING_INT8
    assert Thc(bits=3, wire_bits=4).reduction(1) is SATURATING_NIBBLES
    # Worst case: all ranks are alike, so all have the largest level at the same place.
    grads = [torch.eye(1, 64).view(-1) for _ in range(18)]
    step = run(thc, grads, "native")
    assert (
        relative_error(step.mean, average([dense_sent(e.sent, step.mean) for e in step.estimates]))
        < 1e-6
    )


def test_one_shot_and_ring_agree_bit_for_bit_while_nothing_saturates() -> None:
    grads = gradients(5000, 8)
    means = [run(Thc(), grads, how).mean for how in ("native", "ring", "tree")]
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_saturation_is_lost_and_in_no_residual() -> None:
    # Four alike: their sum is four times a level, and a third of the levels are 2 or 3.
    grads = normals(1 << 14, 1) * 4
    step = run(Thc(bits=3, wire_bits=4, stages=31), grads)
    sent = average([dense_sent(e.sent, g) for e, g in zip(step.estimates, grads, strict=True)])
    assert relative_error(sent, grads[0]) < 0.3
    assert float(torch.linalg.vector_norm(step.mean) / torch.linalg.vector_norm(sent)) < 0.99
    for grad, residual, estimate in zip(grads, step.residuals, step.estimates, strict=True):
        assert relative_error(residual + dense_sent(estimate.sent, grad), grad) < 1e-6


def test_bias_is_that_of_clamping() -> None:
    grad = gradients(1000, 1)[0]
    thc = Thc(bits=4)
    sents = [run(thc, [grad], step=step).estimates[0].sent for step in range(400)]
    total = average([dense_sent(s, grad) for s in sents])
    # The part along the gradient, which no noise hides: at most 1/500 is missing.
    along = float(total @ grad.double() / (grad.double() @ grad.double()))
    assert along == pytest.approx(1.0, abs=0.002)
    # 400 draws leave a twentieth of the deviation of one, .19.
    assert relative_error(total, grad) < 1.3 * 0.19 / 20


@pytest.mark.parametrize("wire_bits", [4, 8])
def test_residuals_stay_bounded(wire_bits: int) -> None:
    thc, residuals, n = Thc(bits=3, wire_bits=wire_bits), None, 2048
    largest = 0.0
    for step in range(60):
        done = run(thc, gradients(n, 4, seed=step), residuals=residuals, step=step)
        residuals = done.residuals
        largest = max(float(torch.linalg.vector_norm(r)) for r in residuals)
    typical = float(torch.linalg.vector_norm(gradients(n, 1)[0]))
    assert largest < typical


def test_every_block_has_a_scale_of_its_own() -> None:
    small, large = normals(1024, 1)[0] * 1e-4, normals(1024, 1, seed=1)[0]
    grad = torch.cat([small, large])
    apart = run(Thc(bits=4), [grad]).mean
    together = run(Thc(bits=4, stages=31), [grad]).mean
    assert relative_error(apart[:1024], small) < 0.25
    assert relative_error(together[:1024], small) > 100.0


@pytest.mark.parametrize("scale", [1e-35, 1e-15, 1e15, 1e25, 1e36])
def test_scales_from_one_end_of_the_range_to_the_other(scale: float) -> None:
    grad = gradients(3000, 1)[0]
    grad *= scale / float(grad.abs().max())
    step = run(Thc(bits=6), [grad])
    assert step.mean.isfinite().all()
    if scale < 1e-30:
        # Too small to be sent: it waits.
        assert torch.equal(step.residuals[0], grad)
    elif 1e-15 <= scale <= 1e15:
        assert relative_error(step.mean, grad) < 0.1
    else:
        # The square of the norm overflows, and a bound on it makes the grid coarse.
        assert relative_error(step.mean, grad) < 1.0


def test_pads_to_whole_blocks_of_at_most_the_bucket() -> None:
    for n, blocks, size in ((1, 1, 2), (2, 1, 2), (64, 1, 64), (1025, 2, 2048), (4096, 4, 4096)):
        norms, codes = Thc().wire(n)
        assert (norms.bytes, codes.bytes) == (4 * blocks, size)
        assert Thc(bits=3, wire_bits=4).wire(n)[1].bytes == size // 2
    assert Thc(stages=31).wire(4097)[1].bytes == 8192


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="wire_bits must be 4 or 8, got 6"):
        Thc(wire_bits=6)
    with pytest.raises(ConfigError, match="bits must be at most wire_bits, 4, got 5"):
        Thc(bits=5, wire_bits=4)
    four = (Setting("bits", "3"), Setting("wire_bits", "4"))
    with pytest.raises(ConfigError, match=r"can be carried by .*ring.*, got 'native'"):
        create(Option("thc", 1.0, "native", settings=four))
    assert create(Option("thc", 1.0, "ring", settings=four)) == Thc(bits=3, wire_bits=4)

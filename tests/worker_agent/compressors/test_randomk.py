from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import DENSE
from gradpilot.worker_agent.compressors.base import At, option_of
from gradpilot.worker_agent.compressors.randomk import RandomK, draw
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.testing import (
    Case,
    CompressorConformance,
    average,
    gradients,
    relative_error,
    same_bits,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step

CPU = torch.device("cpu")


class TestRandomK(CompressorConformance):
    compressors = (RandomK(ratio=0.01), RandomK(ratio=0.3))
    dense = (RandomK(ratio=1.0),)


class TestRandomKInSixteenBits(CompressorConformance):
    compressors = (RandomK(ratio=0.3, wire_dtype="bf16"),)
    dense = (RandomK(ratio=1.0, wire_dtype="fp16"),)
    tolerance = 2e-2


class TestUnbiasedRandomK(CompressorConformance):
    compressors = (RandomK(ratio=0.3, estimate="unbiased"),)
    dense = (RandomK(ratio=1.0, estimate="unbiased"),)
    # What is not drawn counts as sent: the mean is that of the gradients in expectation only.
    conserving = False

    def test_skip_feedback_keeps_what_was_omitted(self, ring_case: Case, world_size: int) -> None:
        """The residual holds the drawn values that were left out, and nothing else."""
        grads = gradients(4097, world_size)
        drawn = draw(4097, 1229, self._ats(world_size, 4097, feedback=True)[0], CPU)
        for skip in range(1, world_size):
            option = self._skipping(ring_case, world_size, skip, feedback=True)
            for grad, residual in zip(
                grads, self.step(ring_case, grads, option=option).residuals, strict=True
            ):
                left = residual != 0
                assert torch.equal(residual[left], grad[left])
                assert bool(torch.isin(left.nonzero().view(-1), drawn).all())
                assert int(left.sum()) == pytest.approx(1229 * skip / world_size, abs=world_size)


def one_step(compressor: RandomK, grads: list[Tensor], step: int = 0) -> VirtualStep:
    return virtual_step(option_of(compressor, "native"), grads, step=step)


def at(step: int = 0, rank: int = 0, bucket: str = "b", seed: int = 0) -> At:
    return At(rank, 4, step, bucket, seed)


@settings(deadline=None, max_examples=200)
@given(n=st.integers(1, 500), share=st.floats(0.0, 1.0), step=st.integers(0, 1000))
def test_draws_different_indices_in_bounds(n: int, share: float, step: int) -> None:
    k = max(1, int(share * n))
    drawn = draw(n, k, at(step), CPU)
    assert drawn.dtype == torch.int64
    assert len(set(drawn.tolist())) == k
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < n


def test_draws_from_the_largest_bucket() -> None:
    n = (1 << 31) - 1
    drawn = draw(n, 1000, at(), CPU)
    assert len(set(drawn.tolist())) == 1000
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < n


def test_seed_step_and_bucket_determine_the_draw_and_the_rank_does_not() -> None:
    first = draw(1000, 50, at(), CPU)
    assert torch.equal(first, draw(1000, 50, at(rank=3), CPU))
    for other in (at(step=1), at(bucket="c"), at(seed=1)):
        assert not torch.equal(first, draw(1000, 50, other, CPU))


@pytest.mark.parametrize(("n", "k"), [(7, 3), (10, 9), (12, 4)])
def test_every_index_is_drawn_as_often(n: int, k: int) -> None:
    # Also where n/k is not whole, so that strata differ in width.
    counts, draws = torch.zeros(n), 4000
    for step in range(draws):
        counts[draw(n, k, at(step), CPU)] += 1
    share = k / n
    deviation = (draws * share * (1 - share)) ** 0.5
    assert ((counts - draws * share).abs() < 4.5 * deviation).all(), counts


def test_own_values_at_the_drawn_places() -> None:
    grads = gradients(500, 4)
    step = one_step(RandomK(ratio=0.1), grads, step=3)
    indices = draw(500, 50, At(0, 4, 3), CPU)
    chosen = torch.zeros(500).index_fill_(0, indices, 1.0)
    for grad, estimate, residual in zip(grads, step.estimates, step.residuals, strict=True):
        assert isinstance(estimate.sent, Sparse)
        assert torch.equal(estimate.sent.values, grad[estimate.sent.indices])
        assert torch.equal(residual, grad * (1.0 - chosen))
    assert relative_error(step.mean, average(grads) * chosen) < 1e-6


def test_all_elements_are_the_dense_mean_bit_for_bit() -> None:
    grads = gradients(1001, 3)
    dense = virtual_step(DENSE, grads).mean
    for estimate in ("feedback", "unbiased"):
        assert same_bits(one_step(RandomK(ratio=1.0, estimate=estimate), grads).mean, dense)


def test_no_index_is_sent() -> None:
    assert [r.bytes for r in RandomK(ratio=0.1).wire(1000)] == [400]
    assert [r.bytes for r in RandomK(ratio=0.1, wire_dtype="fp16").wire(1000)] == [200]


@pytest.mark.parametrize("ratio", [0.1, 0.3])
def test_unbiased_mean_and_its_variance(ratio: float) -> None:
    # E ||estimate - mean||^2 = (n/k - 1) ||mean||^2, as without replacement.
    n, draws = 1000, 1500
    grads = gradients(n, 2)
    true, total, squared = average(grads), torch.zeros(n).double(), 0.0
    for step in range(draws):
        mean = one_step(RandomK(ratio=ratio, estimate="unbiased"), grads, step).mean.double()
        total += mean
        squared += float((mean - true).square().sum())
    variance = (1 / ratio - 1) * float(true.square().sum())
    assert squared / draws == pytest.approx(variance, rel=0.1)
    # The mean of the draws errs by the variance over their number.
    assert float((total / draws - true).square().sum()) < 1.5 * variance / draws


def test_feedback_alone_is_biased() -> None:
    grads = gradients(1000, 2)
    total = sum(one_step(RandomK(ratio=0.1), grads, step).mean.double() for step in range(300))
    assert isinstance(total, Tensor)
    assert relative_error(total / 300, 0.1 * average(grads)) < 0.25
    assert relative_error(total / 300, average(grads)) > 0.8


@pytest.mark.parametrize("estimate", ["feedback", "unbiased"])
def test_the_residual_stays_bounded(estimate: str) -> None:
    option = option_of(RandomK(ratio=0.1, estimate=estimate), "native")
    residuals, arrived, steps = None, torch.zeros(200).double(), 400
    grad = torch.linspace(0.5, 1.5, 200)
    for number in range(steps):
        step = virtual_step(option, [grad, grad], residuals, step=number)
        residuals, arrived = step.residuals, arrived + step.mean.double()
    # Of an element that waits for its turn: ten steps on average, in strata seldom over a hundred.
    assert all(float(r.abs().max()) < 150 for r in residuals or ())
    assert relative_error(arrived, steps * grad) < 0.2


def test_unbiased_values_of_sixteen_bits_do_not_overflow() -> None:
    grads = [torch.full((100,), 6e4).half()] * 4
    for wire_dtype in ("fp32", "fp16"):
        compressor = RandomK(ratio=0.1, estimate="unbiased", wire_dtype=wire_dtype)
        mean = one_step(compressor, grads).mean
        assert mean.isfinite().all()
        assert mean.max() == torch.finfo(torch.float16).max


@pytest.mark.parametrize("setting", [{"ratio": 0.0}, {"estimate": "x"}, {"wire_dtype": "int8"}])
def test_refuses_settings_out_of_bounds(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"randomk: setting {name} must be"):
        RandomK(**setting)

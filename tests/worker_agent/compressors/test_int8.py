from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.worker_agent.compressors.base import option_of
from gradpilot.worker_agent.compressors.int8 import Int8
from gradpilot.worker_agent.testing import (
    SIZES,
    Case,
    CompressorConformance,
    average,
    dense_sent,
    gradients,
    relative_error,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step

EXCHANGES = ("all_reduce", "all_gather", "all_to_all")
ROUNDINGS = ("nearest", "stochastic")
ALL = [Int8(exchange=way, rounding=how) for way in EXCHANGES for how in ROUNDINGS]


class TestInt8(CompressorConformance):
    compressors = (
        Int8(exchange="all_reduce"),
        Int8(exchange="all_reduce", rounding="stochastic"),
        Int8(exchange="all_gather", block=32),
    )
    # A level may be far from the element that it stands for, so their difference rounds.
    exact = False


class TestInt8AllToAll(CompressorConformance):
    compressors = (Int8(exchange="all_to_all"),)
    exact = False

    def test_padding_is_at_most_a_block_a_rank(self, case: Case, world_size: int) -> None:
        """Parts are whole blocks, so some may be empty; both stages carry equal parts."""
        compressor = case.compressor
        assert isinstance(compressor, Int8)
        block = compressor.block
        for n in (*SIZES, world_size * block, 3 * world_size * block):
            first, second = self.step(case, gradients(n, world_size)).wire
            assert (first.collective, second.collective) == ("all_to_all", "all_gather")
            assert first.bytes == world_size * second.bytes
            blocks = -(-n // block)
            assert 0 <= first.bytes - blocks * (block + 4) < world_size * (block + 4)


def run(int8: Int8, grads: list[Tensor], **more: Any) -> VirtualStep:
    return virtual_step(option_of(int8, int8.collectives[0]), grads, compressor=int8, **more)


def levels(int8: Int8, world_size: int) -> int:
    return 127 // world_size if int8.exchange == "all_reduce" else 127


@given(
    st.sampled_from([*ALL, Int8(exchange="all_to_all", block=32)]),
    st.integers(1, 700),
    st.integers(1, 5),
    st.integers(0, 999),
)
@settings(deadline=None, max_examples=60)
def test_no_element_errs_by_more_than_a_level(
    int8: Int8, n: int, world_size: int, seed: int
) -> None:
    grads = gradients(n, world_size, seed=seed)
    step = run(int8, grads, step=seed)
    shared = torch.stack(grads).abs().amax(0)
    share = 0.5 if int8.rounding == "nearest" else 1.0
    truth = average(grads)
    for start in range(0, n, int8.block):
        part = slice(start, start + int8.block)
        level = float(shared[part].max()) / levels(int8, world_size)
        stages = 2 if int8.exchange == "all_to_all" else 1
        error = (step.mean[part].double() - truth[part]).abs().max()
        assert float(error) <= 1.01 * stages * share * level


@pytest.mark.parametrize("exchange", ["all_reduce", "all_gather"])
def test_nearest_leaves_no_more_of_an_element_than_it_had(exchange: str) -> None:
    for world_size in (1, 4, 42):
        grads = gradients(2000, world_size)
        for grad, residual in zip(
            grads, run(Int8(exchange=exchange), grads).residuals, strict=True
        ):
            assert bool((residual.abs() <= grad.abs() * (1.0 + 1e-6)).all())


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_stochastic_rounding_is_unbiased(exchange: str) -> None:
    grads = gradients(300, 2)
    int8, steps = Int8(exchange=exchange, rounding="stochastic"), 400
    means = torch.stack([run(int8, grads, step=s).mean.double() for s in range(steps)])
    error = torch.linalg.vector_norm(means.mean(0) - average(grads))
    expected = torch.linalg.vector_norm(means.std(0)) / steps**0.5
    assert float(error) < 1.3 * float(expected)
    nearest = run(Int8(exchange=exchange), grads).mean
    assert float(error) < float(torch.linalg.vector_norm(nearest - average(grads)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 42])
def test_integer_sums_use_the_range_and_cannot_overflow(world_size: int) -> None:
    # All ranks have the largest code at the same place, of the same sign.
    grads = [torch.tensor([5.0, -5.0, 0.0, 1.0]) for _ in range(world_size)]
    mean = run(Int8(), grads).mean
    assert mean[:3].tolist() == pytest.approx([5.0, -5.0, 0.0], rel=1e-6)
    assert abs(float(mean[3]) - 1.0) <= 0.5 * 5.0 / (127 // world_size)


def test_ranks_agree_on_the_largest_peak_for_integer_sums_only() -> None:
    # 257 elements: one block, and one of a single element.
    weak, strong = torch.full((257,), 0.001), torch.full((257,), 1000.0)
    shared = run(Int8(), [weak, strong])
    assert torch.equal(shared.residuals[0], weak)
    for exchange in ("all_gather", "all_to_all"):
        sent = run(Int8(exchange=exchange), [weak, strong]).estimates[1].sent
        assert relative_error(dense_sent(sent, strong), strong) < 0.005
    own = run(Int8(exchange="all_gather"), [weak, strong])
    assert relative_error(own.mean, average([weak, strong])) < 1e-6


def test_every_block_has_a_scale_of_its_own() -> None:
    grad = torch.cat([gradients(256, 1)[0] * 1e-6, gradients(256, 1, seed=1)[0]])
    for int8 in ALL:
        assert relative_error(run(int8, [grad]).mean[:256], grad[:256]) < 0.05


def test_own_scales_are_finer_than_integer_sums() -> None:
    grads = gradients(1 << 14, 8)
    errors = [
        relative_error(run(Int8(exchange=way), grads).mean, average(grads)) for way in EXCHANGES
    ]
    summed, gathered, two_stages = errors
    assert gathered < two_stages < summed
    assert two_stages < 3.5 * gathered
    assert summed > 4.0 * gathered


def test_the_second_stage_leaves_its_error_with_the_rank_that_rounds() -> None:
    grads = gradients(1024, 4)
    step = run(Int8(exchange="all_to_all"), grads)
    gathered = run(Int8(exchange="all_gather"), grads)
    for rank, (mine, alone) in enumerate(zip(step.residuals, gathered.residuals, strict=True)):
        differs = (mine != alone).view(4, 256).any(1)
        # The first stage rounds as the all-gather does; the own part has the second on top.
        assert differs.tolist() == [part == rank for part in range(4)]


@pytest.mark.parametrize("int8", ALL, ids=lambda c: f"{c.exchange}-{c.rounding}")
def test_residuals_stay_bounded(int8: Int8) -> None:
    residuals = None
    for number in range(40):
        step = run(int8, gradients(600, 8, seed=number), residuals=residuals, step=number)
        residuals = step.residuals
    typical = float(torch.linalg.vector_norm(gradients(600, 1)[0]))
    assert max(float(torch.linalg.vector_norm(r)) for r in residuals or []) < 0.5 * typical


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 3e38])
def test_scales_from_one_end_of_the_range_to_the_other(scale: float) -> None:
    grad = torch.linspace(-1.0, 1.0, 300) * scale
    for int8 in ALL:
        step = run(int8, [grad])
        assert step.mean.isfinite().all()
        if scale < 1e-36:
            # Too small to be sent: it waits.
            assert torch.equal(step.residuals[0], grad)
        else:
            assert relative_error(step.mean, grad) < 0.02


def test_sixteen_bit_gradients_near_the_end_of_their_range() -> None:
    for int8 in ALL:
        mean = run(int8, [torch.full((300,), 6e4).half()] * 4).mean
        assert mean.tolist() == pytest.approx([60000.0] * 300, rel=0.01)


def test_refuses_more_ranks_than_sums_leave_levels_for() -> None:
    Int8().check(42, "native")
    with pytest.raises(ConfigError, match=r"at most 42 ranks, got 43.*leave 2 levels"):
        Int8().check(43, "native")
    stochastic = Int8(rounding="stochastic")  # 8 levels, half the root of 256
    assert stochastic.most_ranks == 15
    with pytest.raises(ConfigError, match="rounding=stochastic serves at most 15 ranks, got 16"):
        stochastic.check(16, "native")
    for exchange in ("all_gather", "all_to_all"):
        Int8(exchange=exchange).check(4096, Int8(exchange=exchange).collectives[0])


def test_the_exchange_decides_who_can_carry_it() -> None:
    assert "native" in Int8().collectives
    assert "allgather" in Int8(exchange="all_gather").collectives
    assert Int8(exchange="all_to_all").collectives == ("alltoall",)

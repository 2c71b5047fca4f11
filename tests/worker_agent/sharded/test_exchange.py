"""Sharded exchanges on virtual ranks: whose shard comes out, what stays behind, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import DENSE, Option, WireRound
from gradpilot.protos.option_text import parse_option
from gradpilot.worker_agent.collectives.base import ReduceScatter
from gradpilot.worker_agent.compressors.base import At, Estimate, leave_residual_
from gradpilot.worker_agent.sharded.exchange import compile_sharded
from gradpilot.worker_agent.sharded.ring import ring_order, scatter_schedule
from gradpilot.worker_agent.virtual import run_lockstep, run_schedules

BF16, FP16 = parse_option("bf16"), parse_option("fp16")
INT8 = parse_option("int8 collective=alltoall exchange=all_to_all")
DITHERED = parse_option("int8 collective=alltoall exchange=all_to_all rounding=stochastic")
CODED = (BF16, FP16, INT8, DITHERED)


def skip(steps: int, **fields: object) -> Option:
    return Option("none", collective="ring", skip=steps, **fields)  # type: ignore[arg-type]


def gradients(
    n: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n * width, generator=generator).pow(3).to(dtype) for _ in range(n)]


def exchange(
    option: Option, grads: list[Tensor], step: int = 0, feedback: bool = True
) -> tuple[list[Estimate], list[WireRound]]:
    """Carry an exchange out on virtual ranks; a ring by its schedule, as the driver does."""
    n = len(grads)
    compiled = compile_sharded(option, n, feedback)
    assert compiled.exchange is not None
    ats = [At(r, n, step, "unit", feedback=compiled.feedback) for r in range(n)]
    rounds = [compiled.exchange(g, at) for g, at in zip(grads, ats, strict=True)]
    log: list[WireRound] = []
    if option.collective != "ring":
        return run_lockstep(rounds, ats, option, log=log), log
    requests = [next(r) for r in rounds]
    payloads = [q.payload for q in requests if isinstance(q, ReduceScatter)]
    order = ring_order(ats[0], option.rotation)
    run_schedules(payloads, [scatter_schedule(order, r, option.skip) for r in range(n)])
    found = []
    for rank, r in enumerate(rounds):
        with pytest.raises(StopIteration) as stop:
            r.send(payloads[rank].view(n, -1)[rank])
        found.append(stop.value.value)
    return found, log


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("option", CODED, ids=lambda o: o.label)
def test_every_rank_gets_its_shard_of_what_was_sent(option: Option, n: int) -> None:
    grads = gradients(n, width=301)
    estimates, log = exchange(option, grads)
    sent = []
    for grad, estimate in zip(grads, estimates, strict=True):
        residual = leave_residual_(grad.clone(), estimate)
        sent.append(grad - residual)
        # No more than a step of eight bits, of the largest block.
        assert float(residual.abs().max()) <= float(grad.abs().max()) / 127 * 1.001
    mean = torch.stack(sent).mean(0).view(n, -1)
    for rank, estimate in enumerate(estimates):
        assert torch.allclose(estimate.mean, mean[rank], rtol=1e-5, atol=1e-6)
    assert [r.collective for r in log] == ["all_to_all"]


def test_bytes_are_half_and_about_a_quarter() -> None:
    n, width = 4, 1000
    dense = 4 * n * width
    for option, most in ((BF16, 0.5), (FP16, 0.5), (INT8, 0.26)):
        _, log = exchange(option, gradients(n, width))
        assert sum(r.bytes for r in log) <= most * dense


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 5), width=st.integers(1, 40), seed=st.integers(0, 99),
    scale=st.floats(1e-20, 1e20), which=st.integers(0, 2),
)  # fmt: skip
def test_sent_and_residual_are_the_corrected_gradient(
    n: int, width: int, seed: int, scale: float, which: int
) -> None:
    option = (BF16, INT8, skip(1, skip_feedback=True) if n > 2 else BF16)[which]
    grads = [g * scale for g in gradients(n, width, seed)]
    before = [g.clone() for g in grads]
    estimates, _ = exchange(option, grads)
    for grad, kept, estimate in zip(grads, before, estimates, strict=True):
        assert torch.equal(grad, kept)  # with feedback the gradient is the caller's
        residual = leave_residual_(grad.clone(), estimate)
        sent = leave_residual_(torch.zeros_like(grad), estimate).neg_()
        if option == INT8:  # the product of code and scale is rounded, then the difference
            assert torch.allclose(sent + residual, grad, rtol=2e-6, atol=scale * 1e-6)
        else:
            assert torch.equal(sent + residual, grad)
        assert bool(estimate.mean.isfinite().all())


@pytest.mark.parametrize("divisor", ["skip", "drop"])
@pytest.mark.parametrize("feedback", [False, True])
def test_skipping_equals_a_masked_mean(divisor: str, feedback: bool) -> None:
    n, width, steps = 4, 50, 1
    option = skip(steps, divisor=divisor, skip_feedback=feedback)
    grads = gradients(n, width, dtype=torch.float64)
    before = torch.stack(grads).clone()
    estimates, _ = exchange(option, grads, step=7)
    order = ring_order(At(0, n, 7, "unit"), "random")
    masked = before.view(n, n, width).clone()
    for rank in range(n):
        for shard in scatter_schedule(order, rank, steps).omitted:
            masked[rank, shard] = 0.0
    divisor_value = n if divisor == "skip" else n - steps
    for rank, estimate in enumerate(estimates):
        assert torch.allclose(estimate.mean, masked[:, rank].sum(0) / divisor_value)
        residual = leave_residual_(before[rank].clone(), estimate)
        rest = before[rank] - masked[rank].flatten() if feedback else torch.zeros(n * width)
        assert torch.equal(residual, rest.double())


@pytest.mark.parametrize("option", CODED, ids=lambda o: o.label)
@pytest.mark.parametrize("feedback", [False, True])
def test_nan_of_one_rank_reaches_every_shard(option: Option, feedback: bool) -> None:
    grads = gradients(4, 20)
    grads[2].fill_(math.nan)  # as the pipeline hands it over
    estimates, _ = exchange(option, grads, feedback=feedback)
    assert all(bool(e.mean.isnan().any()) for e in estimates)


@pytest.mark.parametrize("option", [BF16, FP16], ids=lambda o: o.label)
def test_values_beyond_the_range_stay_finite_and_the_rest_waits(option: Option) -> None:
    grads = [torch.full((4,), 3.4e38), torch.full((4,), 3.4e38)]
    estimates, _ = exchange(option, grads)
    assert all(bool(e.mean.isfinite().all()) for e in estimates)
    residual = leave_residual_(grads[0].clone(), estimates[0])
    assert bool((residual > 0).all())


def test_sixteen_bit_gradients_are_sent_whole() -> None:
    grads = gradients(2, 8, dtype=torch.bfloat16)
    estimates, _ = exchange(BF16, grads)
    assert all(e.sent is None for e in estimates)
    assert estimates[0].mean.dtype == torch.bfloat16


def test_dense_is_left_to_the_framework() -> None:
    assert compile_sharded(DENSE, 4).exchange is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topk ratio=0.1 collective=allgather", "a sharded model can be given"),
        ("int8", "int8 collective=alltoall exchange=all_to_all"),
        ("bf16 collective=ring skip=1", "a sharded model can be given"),
        ("none collective=tree", "a sharded model can be given"),
        ("none collective=ring skip=4", "skip must lie in 0..3"),
        ("none collective=ring skip=3 skip_feedback=true", "could never be sent"),
        ("none collective=ring skip=1 rotation=static skip_feedback=true", "could never be sent"),
    ],
)
def test_other_options_are_refused_with_what_can_be_used(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compile_sharded(parse_option(text), 4)

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting
from gradpilot.worker_agent.compressors.base import At
from gradpilot.worker_agent.compressors.signsgd import SignSgd
from gradpilot.worker_agent.testing import (
    CompressorConformance,
    average,
    dense_sent,
    gradients,
    relative_error,
    same_bits,
)
from gradpilot.worker_agent.virtual import virtual_step
from tests.ranks import run_ranks
from tests.worker_agent import training

EXCHANGES = ("all_gather", "all_reduce")


def option(exchange: str) -> Option:
    carrier = "native" if exchange == "all_reduce" else "allgather"
    return Option("signsgd", collective=carrier, settings=(Setting("exchange", exchange),))


class TestSignSgd(CompressorConformance):
    compressors = SignSgd.ladder()
    # A scale is no multiple of the gradient's last bit.
    exact = False


def expected_vote(grads: list[Tensor]) -> Tensor:
    scale = average([g.double().abs().mean() for g in grads])
    votes = torch.stack([torch.where(g < 0, -1, 1) for g in grads]).sum(0)
    return scale * votes.sign()


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_majority_decides(exchange: str, world_size: int) -> None:
    grads = gradients(333, world_size)
    mean = virtual_step(option(exchange), grads).mean
    assert relative_error(mean, expected_vote(grads)) < 1e-6


@given(st.integers(1, 60), st.integers(1, 6), st.integers(0, 999))
@settings(deadline=None, max_examples=40)
def test_flips_with_the_gradient(n: int, world_size: int, seed: int) -> None:
    grads = gradients(n, world_size, seed=seed)
    for exchange in EXCHANGES:
        step = virtual_step(option(exchange), grads)
        flipped = virtual_step(option(exchange), [-g for g in grads])
        assert torch.equal(flipped.mean, -step.mean)
        for there, back in zip(flipped.residuals, step.residuals, strict=True):
            assert torch.equal(there, -back)


def test_both_exchanges_give_the_same() -> None:
    grads = gradients(1001, 5)
    gathered, summed = (virtual_step(option(exchange), grads) for exchange in EXCHANGES)
    assert relative_error(gathered.mean, summed.mean) < 1e-6
    assert torch.equal(gathered.mean.sign(), summed.mean.sign())
    for one, other in zip(gathered.residuals, summed.residuals, strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_tie_moves_nothing_but_is_remembered(exchange: str) -> None:
    grads = [torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])]
    step = virtual_step(option(exchange), grads)
    assert step.mean.tolist() == [0.0, 1.0]
    # Each rank takes back its own sign; together they have sent nothing.
    assert [e.sent.tolist() for e in step.estimates] == [[1.0, 1.0], [-1.0, 1.0]]  # type: ignore[union-attr]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_ranks_count_as_sent(exchange: str) -> None:
    grads = gradients(200, 5)
    step = virtual_step(option(exchange), grads)
    scale = average([g.double().abs().mean() for g in grads])
    signs = [torch.where(g < 0, -1.0, 1.0).double() for g in grads]
    votes = torch.stack(signs).sum(0)
    for grad, own, estimate in zip(grads, signs, step.estimates, strict=True):
        expected = scale * (votes.sign() + own - votes / 5)
        assert relative_error(dense_sent(estimate.sent, grad), expected) < 1e-6


def test_residuals_stay_bounded_where_those_of_the_bare_result_grow() -> None:
    # Ranks that differ for good: each wants something else, at every step.
    n, world_size = 256, 4
    own = gradients(n, world_size, seed=1)
    norms: list[float] = []
    bare: list[float] = []
    residuals = [torch.zeros(n) for _ in own]
    naive = [torch.zeros(n) for _ in own]
    for number in range(300):
        noise = [torch.randn(n, generator=torch.Generator().manual_seed(number))] * world_size
        grads = [g.sign() + x for g, x in zip(own, noise, strict=True)]
        step = virtual_step(option("all_gather"), grads, residuals, step=number)
        residuals = step.residuals
        norms.append(max(float(r.norm()) for r in residuals))
        corrected = [g + r for g, r in zip(grads, naive, strict=True)]
        result = virtual_step(option("all_gather"), corrected).mean
        naive = [c - result for c in corrected]
        bare.append(max(float(r.norm()) for r in naive))
    assert norms[-1] < 2 * norms[49]
    assert bare[-1] > 3 * bare[49]
    assert bare[-1] > 10 * norms[-1]


@pytest.mark.parametrize(("exchange", "world_size"), [("all_gather", 300), ("all_reduce", 127)])
def test_very_many_ranks(exchange: str, world_size: int) -> None:
    # More votes than a byte counts, and as many as a signed one does. All have the scale 1.
    grads = [torch.ones(9) for _ in range(world_size)]
    for grad in grads[: world_size // 2]:
        grad[4:] = -1.0
    grads[0][8] = grads[-1][8] = 1.0
    compressor = SignSgd(exchange=exchange)
    ranks = [compressor.rounds(g, At(r, world_size, 0)) for r, g in enumerate(grads)]
    requests = [next(rank) for rank in ranks]
    if exchange == "all_gather":
        reply = torch.stack([request.payload for request in requests])
    else:
        requests = [rank.send(torch.ones(1)) for rank in ranks]
        reply = torch.stack([request.payload for request in requests]).sum(0, dtype=torch.int8)
    with pytest.raises(StopIteration) as stop:
        ranks[0].send(reply)
    # Half of 300 tie, 63 of 127 lose.
    tied = 0.0 if world_size % 2 == 0 else 1.0
    expected = [1.0] * 4 + [tied] * 4 + [1.0]
    assert stop.value.value.mean.tolist() == pytest.approx(expected)


def test_refuses_what_it_cannot_count() -> None:
    with pytest.raises(ConfigError, match=r"at most 127 ranks, got 128"):
        SignSgd(exchange="all_reduce").check(128, "native")
    SignSgd(exchange="all_reduce").check(127, "native")
    SignSgd().check(1024, "allgather")
    with pytest.raises(ConfigError, match="exchange must be one of all_gather, all_reduce"):
        SignSgd(exchange="all_to_all")


def test_wire() -> None:
    assert SignSgd().wire(10_000_000)[0].bytes == 1_250_004
    assert [r.bytes for r in SignSgd(exchange="all_reduce").wire(1000)] == [4, 1000]


def _train(rank: int, exchange: str) -> list[tuple[bool, float, str]]:
    net = training.wrap()
    handle = training.control(net, option(exchange))
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
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_over_a_process_group(exchange: str) -> None:
    first, *others = run_ranks(_train, 3, exchange)
    assert all(other == first for other in others)
    assert all(finite and norm > 0.0 for finite, norm, _ in first)


def test_scale_is_of_the_corrected_gradient_of_all() -> None:
    grads = [torch.full((5,), 1.0), torch.full((5,), 3.0)]
    for exchange in EXCHANGES:
        assert same_bits(virtual_step(option(exchange), grads).mean, torch.full((5,), 2.0))

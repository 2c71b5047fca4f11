from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import WireRound
from gradpilot.worker_agent.compressors.base import option_of
from gradpilot.worker_agent.compressors.dgc import Dgc, select
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.testing import (
    SIZES,
    Case,
    CompressorConformance,
    average,
    gradients,
)
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step


class TestDgc(CompressorConformance):
    compressors = (
        Dgc(ratio=0.01),
        Dgc(ratio=0.3),
        Dgc(ratio=0.1, momentum=0.9),
        Dgc(ratio=0.05, momentum=0.5, warm_up=8),
    )
    dense = (Dgc(ratio=1.0), Dgc(ratio=1.0, momentum=0.9))

    def test_wire_formula_is_what_is_handed_in(self, case: Case, world_size: int) -> None:
        """Lengths, then 8 bytes for each element of the rank that sends most, at most k."""
        compressor = case.compressor
        assert isinstance(compressor, Dgc)
        for n in SIZES:
            step = self.step(case, gradients(n, world_size))
            most = max(counts(step))
            assert step.wire == (WireRound("all_gather", 8), WireRound("all_gather", 8 * most))
            k = max(1, math.floor(n * compressor.ratio_at(5)))
            assert 0.8 * k <= most <= k
            k = max(1, math.floor(n * compressor.ratio))
            assert compressor.wire(n) == (
                WireRound("all_gather", 8),
                WireRound("all_gather", 8 * k),
            )


def counts(step: VirtualStep) -> list[int]:
    """Return how many elements every rank sent."""
    sent = [e.sent for e in step.estimates]
    assert all(isinstance(s, Sparse) for s in sent)
    return [s.indices.numel() for s in sent if isinstance(s, Sparse)]


def run(
    compressor: Dgc, grads: Sequence[Sequence[Tensor]], world_size: int = 1
) -> list[VirtualStep]:
    """Return every step of a run; ``grads`` by step and rank."""
    residuals: Sequence[Tensor] | None = None
    memories: Sequence[Mapping[str, Tensor]] | None = None
    steps = []
    for number, given_grads in enumerate(grads):
        step = virtual_step(
            option_of(compressor, "allgather"),
            given_grads,
            residuals,
            step=number,
            memories=memories,
            compressor=compressor,
        )
        residuals, memories = step.residuals, step.memories
        steps.append(step)
    return steps


@given(
    momentum=st.sampled_from([0.3, 0.9]),
    ratio=st.sampled_from([0.05, 0.3, 0.7]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=30)
def test_velocity_and_accumulation_are_those_of_the_paper(
    momentum: float, ratio: float, seed: int
) -> None:
    count = 6
    grads = [gradients(40, 2, seed=100 * seed + i, dtype=torch.float64) for i in range(count)]
    steps = run(Dgc(ratio=ratio, momentum=momentum), grads, 2)
    for rank in range(2):
        u, v = torch.zeros(40).double(), torch.zeros(40).double()
        for number in range(count):
            u = momentum * u + grads[number][rank]
            v = v + u
            sent = steps[number].estimates[rank].sent
            assert isinstance(sent, Sparse)
            torch.testing.assert_close(sent.values, v[sent.indices])
            u[sent.indices] = 0.0
            v[sent.indices] = 0.0
            torch.testing.assert_close(steps[number].residuals[rank], v)
            torch.testing.assert_close(steps[number].memories[rank]["velocity"], u)


def test_at_ratio_one_it_is_momentum_sgd() -> None:
    grads = [gradients(50, 3, seed=i) for i in range(8)]
    weight = torch.nn.Parameter(torch.zeros(50).double())
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    ours = torch.zeros(50).double()
    for number, step in enumerate(run(Dgc(ratio=1.0, momentum=0.9), grads, 3)):
        weight.grad = average(grads[number])
        sgd.step()
        ours -= 0.1 * step.mean.double()
        torch.testing.assert_close(ours, weight.detach(), rtol=1e-5, atol=1e-6)


def test_momentum_follows_what_was_not_sent() -> None:
    # One large element is sent at once, and its velocity does not push on; the small one gathers
    # speed while it waits: 1, then 1 + 1.5, then 1 + 1.5 + 1.75.
    big, small = torch.tensor([[8.0, 1.0]]), torch.tensor([[0.0, 1.0]])
    steps = run(Dgc(ratio=0.5, momentum=0.5), [list(big), list(small), list(small)])
    assert [s.mean.tolist() for s in steps] == [[8.0, 0.0], [0.0, 2.5], [0.0, 1.0]]
    steps = run(Dgc(ratio=0.5, momentum=0.5), [list(big), list(big), list(small)])
    assert [s.mean.tolist() for s in steps] == [[8.0, 0.0], [8.0, 0.0], [0.0, 4.25]]


def test_without_momentum_nothing_is_remembered() -> None:
    step = run(Dgc(ratio=0.1), [gradients(100, 2)], 2)[0]
    assert all(not m for m in step.memories)
    assert all(e.carried is None for e in step.estimates)


def test_a_step_that_was_not_finite_leaves_the_velocity_alone() -> None:
    bad = [gradients(30, 2, seed=7)[0], torch.full((30,), math.inf)]
    good = [gradients(30, 2, seed=i) for i in range(4)]
    compressor = Dgc(ratio=0.2, momentum=0.9)
    with_bad = run(compressor, [*good[:2], bad, *good[2:]], 2)
    without = run(compressor, good, 2)
    assert not bool(with_bad[2].mean.isfinite().all())
    assert torch.equal(with_bad[-1].mean, without[-1].mean)


@given(c=st.floats(0.0005, 1.0), warm_up=st.integers(0, 50))
@settings(deadline=None)
def test_warm_up_falls_geometrically_to_the_ratio(c: float, warm_up: int) -> None:
    ratios = [Dgc(ratio=c, warm_up=warm_up).ratio_at(e) for e in range(warm_up + 3)]
    assert ratios[warm_up:] == [c] * 3
    factor = c ** (1 / (warm_up + 1))
    previous = 1.0
    for ratio in ratios[: warm_up + 1]:
        assert ratio == pytest.approx(previous * factor, rel=1e-9)
        previous = ratio


def test_classic_warm_up() -> None:
    # The paper's 75, 93.75, 98.4, 99.6, 99.9 % of sparsity: .001 over four periods.
    sparsities = [1 - Dgc(ratio=0.25**5, warm_up=4).ratio_at(e) for e in range(5)]
    assert sparsities == pytest.approx([0.75, 0.9375, 0.984, 0.996, 0.999], abs=5e-4)


def test_warm_up_sets_what_is_sent() -> None:
    steps = run(Dgc(ratio=0.01, warm_up=3), [gradients(10_000, 1, seed=i) for i in range(5)])
    for step, ratio in zip(steps, (0.3162, 0.1, 0.03162, 0.01, 0.01), strict=True):
        assert 0.8 * 10_000 * ratio - 1 <= counts(step)[0] <= 10_000 * ratio


@given(
    seed=st.integers(0, 1000),
    power=st.sampled_from([0.2, 1.0, 3.0, 9.0]),
    ratio=st.sampled_from([0.001, 0.01, 0.1, 0.5]),
    n=st.sampled_from([50, 9000, 200_000]),
)
@settings(deadline=None, max_examples=40)
def test_selects_the_largest_at_most_k_and_few_less(
    seed: int, power: float, ratio: float, n: int
) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    x = x.sign() * x.abs() ** power
    k = max(1, int(ratio * n))
    found = select(x, k)
    assert 0.8 * k <= found.numel() <= k
    assert found.tolist() == sorted(set(found.tolist()))
    left = x.abs().index_fill(0, found, 0.0)
    assert x[found].abs().min() >= left.max()


def test_a_misleading_sample_is_corrected() -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    x[::97] *= 4.0  # the sample sees nothing else: too few reach its threshold
    assert 8000 <= select(x, 10_000).numel() <= 10_000
    x[::97] /= 1e3  # too many
    assert select(x, 10_000).numel() == 10_000


def test_zeros_are_not_sent() -> None:
    x = torch.zeros(1000)
    assert select(x, 100).numel() == 0
    x[[3, 5]] = torch.tensor([1.0, -1e-40])
    assert select(x, 100).tolist() == [3, 5]


def test_a_gradient_that_is_not_finite_costs_one_element() -> None:
    assert select(torch.full((1000,), math.nan), 100).numel() == 1


def test_ladder_needs_no_change_of_the_optimizer() -> None:
    assert all(member.momentum == 0.0 for member in Dgc.ladder())
    assert Dgc().momentum == 0.0


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="momentum must be a number"):
        Dgc(momentum=1.0)
    with pytest.raises(ConfigError, match="warm_up must be a whole number"):
        Dgc(warm_up=-1)

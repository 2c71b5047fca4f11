from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, WireRound
from gradpilot.worker_agent.compressors.base import option_of
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.compressors.sidco import (
    MOST_STAGES,
    Sidco,
    adapted,
    fitted_threshold,
)
from gradpilot.worker_agent.testing import SIZES, Case, CompressorConformance, gradients
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step


class TestSidco(CompressorConformance):
    compressors = (Sidco(ratio=0.01), Sidco(ratio=0.3))
    dense = (Sidco(ratio=1.0),)

    def test_wire_formula_is_what_is_handed_in(self, case: Case, world_size: int) -> None:
        """Lengths, then 8 bytes for each element of the rank that sends most, never 4 times k."""
        for n in SIZES:
            step = self.step(case, gradients(n, world_size))
            most = max(counts(step))
            assert step.wire == (WireRound("all_gather", 8), WireRound("all_gather", 8 * most))
            assert step.wire[1].bytes <= 4 * case.compressor.wire(n)[1].bytes


def counts(step: VirtualStep) -> list[int]:
    """Return how many elements every rank sent."""
    sent = [e.sent for e in step.estimates]
    assert all(isinstance(s, Sparse) for s in sent)
    return [s.indices.numel() for s in sent if isinstance(s, Sparse)]


def option(ratio: float) -> Option:
    return option_of(Sidco(ratio=ratio), "allgather")


def exponential(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (1_000_000,), generator=generator) * 2 - 1
    return torch.empty(1_000_000).exponential_(generator=generator) * sign * 3e-4


def test_one_stage_is_the_quantile_of_the_exponential() -> None:
    x = torch.tensor([0.5, 1.0, 1.5])
    assert fitted_threshold(x, 0.01, 0.25, 1) == pytest.approx(-math.log(0.01))
    # The ratio is above what the first stage would keep.
    assert fitted_threshold(x, 0.3, 0.25, 4) == pytest.approx(-math.log(0.3))


def test_a_second_stage_is_fitted_to_what_exceeds_the_first() -> None:
    x = torch.tensor([1.0] * 6 + [4.0, 6.0])
    first = 2.0 * -math.log(0.25)  # 2.77
    assert first < 4.0
    assert fitted_threshold(x, 0.01, 0.25, 2) == pytest.approx(4.0 - (5.0 - 4.0) * math.log(0.04))


def test_stages_end_where_nothing_is_left() -> None:
    assert fitted_threshold(torch.ones(8), 0.001, 0.25, 6) == pytest.approx(-math.log(0.25))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize(("ratio", "tolerance"), [(0.1, 0.01), (0.01, 0.03), (0.001, 0.10)])
def test_any_number_of_stages_hits_the_target_on_exponential_data(
    ratio: float, tolerance: float, stages: int
) -> None:
    x = exponential(1).abs()
    reached = float((x >= fitted_threshold(x, ratio, 0.25, stages)).double().mean())
    assert reached == pytest.approx(ratio, rel=tolerance)


@pytest.mark.parametrize(("ratio", "tolerance"), [(0.1, 0.03), (0.01, 0.06), (0.001, 0.20)])
def test_selects_about_k_from_a_sample(ratio: float, tolerance: float) -> None:
    grads = [exponential(2), exponential(3)]
    step = virtual_step(option(ratio), grads)
    assert [c / 1e6 for c in counts(step)] == pytest.approx([ratio] * 2, rel=tolerance)
    for grad, estimate in zip(grads, step.estimates, strict=True):
        assert isinstance(estimate.sent, Sparse)
        indices = estimate.sent.indices.long()
        left = grad.clone().index_fill_(0, indices, 0.0)
        assert grad[indices].abs().min() >= left.abs().max()


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "gauss": lambda z: z,
    "cubed": lambda z: z**3,
    "fifth power": lambda z: z**5,
}


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
@pytest.mark.parametrize("name", list(DRAWS))
def test_the_number_of_stages_settles_where_the_fit_is_best(name: str, ratio: float) -> None:
    generator = torch.Generator().manual_seed(0)
    n, memories = 1 << 16, None
    used = []
    for number in range(24):
        grad = DRAWS[name](torch.randn(n, generator=generator))
        step = virtual_step(option(ratio), [grad], step=number, memories=memories)
        memories = step.memories
        used.append(int(memories[0]["stages"]))
    # Best of all numbers, by one large draw.
    x = DRAWS[name](torch.randn(1 << 19, generator=generator)).abs()
    missed = []
    for m in range(1, MOST_STAGES + 1):
        reached = float((x >= fitted_threshold(x, ratio, 0.25, m)).sum())
        missed.append(abs(math.log(max(reached, 0.5) / (ratio * x.numel()))))
    assert missed[used[-1] - 1] <= min(missed) + 0.25
    assert len(set(used[-6:])) <= 2


def after(misses: Mapping[int, float], stages: int) -> int:
    """Return the next number of stages when these misses were seen, the last with ``stages``."""
    memory: dict[str, Tensor] = {}
    for m, miss in misses.items():
        if m != stages:
            memory = adapted(memory, m, round(1e6 * math.exp(miss)), 1_000_000)
    memory = adapted(memory, stages, round(1e6 * math.exp(misses[stages])), 1_000_000)
    return int(memory["stages"])


@pytest.mark.parametrize(
    ("misses", "stages", "expected"),
    [
        ({2: 0.18}, 2, 2),  # within 20 %
        ({2: 0.19}, 2, 3),  # more stages first
        ({2: -0.19}, 2, 3),
        ({2: 0.5, 3: 0.9}, 3, 4),  # untried
        ({2: 0.5, 3: 0.9, 4: 1.5}, 3, 2),  # both neighbours are known
        ({2: 0.5, 3: 0.4, 4: 1.5}, 3, 3),
        ({1: 0.9}, 1, 2),
        ({MOST_STAGES: 0.9}, MOST_STAGES, MOST_STAGES - 1),
    ],
)
def test_next_number_of_stages(misses: dict[int, float], stages: int, expected: int) -> None:
    assert after(misses, stages) == expected


def test_what_another_number_of_stages_missed_long_ago_is_forgotten() -> None:
    memory: dict[str, Tensor] = {}
    for stages in (1, 3, 2):
        memory = adapted(memory, stages, 3 if stages == 2 else 9, 1)
    assert int(memory["stages"]) == 2
    tried = []
    for _ in range(60):
        tried.append(int(memory["stages"]))
        memory = adapted(memory, tried[-1], 1 if tried[-1] == 3 else 3, 1)  # 3 would hit now
    assert tried[:20] == [2] * 20
    assert tried[-1] == 3


def test_equal_magnitudes_are_sent_all_the_same() -> None:
    signs = [1.0, -1.0] * 500
    step = virtual_step(option(0.01), [torch.tensor(signs)])
    assert counts(step) == [10]
    step = virtual_step(option(0.01), [torch.tensor([1.0] * 3 + [0.0] * 997)])
    assert set(step.mean.nonzero().view(-1).tolist()) == {0, 1, 2}


def test_a_gradient_that_is_not_finite_costs_one_element() -> None:
    step = virtual_step(option(0.1), [torch.full((1000,), math.nan), torch.zeros(1000)])
    assert not bool(step.mean.isfinite().all())
    assert step.wire[1].bytes <= 8 * 100


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="first must be a number"):
        Sidco(first=1.0)
    with pytest.raises(ConfigError, match="ratio must be a number"):
        Sidco(ratio=0.0)

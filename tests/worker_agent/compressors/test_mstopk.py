from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option
from gradpilot.worker_agent.compressors import mstopk
from gradpilot.worker_agent.compressors.mstopk import MsTopK, select, select_from_all
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.testing import CompressorConformance, gradients
from gradpilot.worker_agent.virtual import virtual_step


class TestMsTopK(CompressorConformance):
    compressors = (MsTopK(ratio=0.01), MsTopK(ratio=0.3))
    dense = (MsTopK(ratio=1.0),)


def by_definition(x: Tensor, k: int, place: int) -> list[int]:
    """Bisect on the fraction of the way from mean to maximum, one element after the other."""
    a = [abs(v) for v in x.double().tolist()]
    mean, most = float(x.double().abs().mean()), max(a)
    left, right = 0.0, 1.0
    upper, lower = math.inf, 0.0
    for _ in range(25):
        rho = (left + right) / 2
        threshold = mean + rho * (most - mean)
        if sum(v >= threshold for v in a) <= k:
            right, upper = rho, threshold
        else:
            left, lower = rho, threshold
    sure = [i for i, v in enumerate(a) if v >= upper]
    band = [i for i, v in enumerate(a) if lower <= v < upper]
    missing = k - len(sure)
    start = place % (len(band) - missing + 1)
    return sorted(sure + band[start : start + missing])


@given(
    # Multiples of 1/4: many ties and zeros, and sums without rounding.
    values=st.lists(st.integers(-20, 20), min_size=1, max_size=60),
    share=st.floats(0.0, 1.0),
    place=st.integers(0, 2**63 - 1),
)
@settings(deadline=None, max_examples=150)
def test_selects_what_the_definition_says(values: list[int], share: float, place: int) -> None:
    x = torch.tensor(values, dtype=torch.float64) / 4
    k = max(1, int(share * len(values)))
    assert select(x, k, place).tolist() == by_definition(x, k, place)


def cases() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    n = (1 << 17) + 3
    gauss = torch.randn(n, generator=generator, dtype=torch.float64)
    spike = gauss.clone()
    spike[77] = 1e12
    misleading = gauss.clone()
    misleading[::11] = 50.0
    return {
        "gauss": gauss,
        "heavy tail": gauss**3,
        "whole numbers": (3 * gauss).round(),
        "mostly zero": gauss * (torch.rand(n, generator=generator) < 0.001),
        "equal": torch.ones(n, dtype=torch.float64),
        "zeros": torch.zeros(n, dtype=torch.float64),
        "one spike": spike,
        "misleading sample": misleading,
    }


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("name", list(cases()))
def test_filtering_first_changes_nothing(name: str, ratio: float) -> None:
    x = cases()[name]
    k = int(ratio * x.numel())
    found = select(x, k, 123_456_789)
    assert torch.equal(found, select_from_all(x, k, 123_456_789))
    assert len(set(found.tolist())) == k


def test_large_buckets_are_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Tensor:
        raise AssertionError("looked at all elements again and again")

    monkeypatch.setattr(mstopk, "select_from_all", refuse)
    assert select(cases()["gauss"].float(), 1311, 0).numel() == 1311


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1000, 1 << 17])
def test_exactly_k_and_little_less_than_the_best(dtype: torch.dtype, n: int) -> None:
    x = gradients(n, 1, dtype=dtype)[0]
    k = n // 100
    found = select(x, k, 5)
    assert len(set(found.tolist())) == k
    best = x.abs().topk(k).values.double()
    energy = float(x[found].double().square().sum())
    assert energy <= float(best.square().sum()) * (1 + 1e-12)
    assert energy >= 0.98 * float(best.square().sum())


def test_the_window_is_drawn_anew_and_stays_inside() -> None:
    # All tie: the window alone decides. Its last place is as likely as the first.
    x = torch.ones(10)
    starts = {tuple(select(x, 7, place).tolist()) for place in range(8)}
    assert starts == {tuple(range(s, s + 7)) for s in range(4)}
    option = Option("mstopk", 0.1, "allgather")
    seen = set()
    for number in range(20):
        for estimate in virtual_step(option, [torch.ones(40)] * 2, step=number).estimates:
            assert isinstance(estimate.sent, Sparse)
            indices = estimate.sent.indices.tolist()
            assert indices == list(range(indices[0], indices[0] + 4))
            seen.add(indices[0])
    assert len(seen) > 10


@pytest.mark.parametrize("n", [64, 1 << 17])
def test_a_single_infinity_is_among_the_selected(n: int) -> None:
    x = gradients(n, 1)[0]
    x[n // 3] = -math.inf
    assert n // 3 in select(x, n // 50, 0).tolist()


def test_refuses_a_ratio_out_of_bounds() -> None:
    with pytest.raises(ConfigError, match="ratio must be a number"):
        MsTopK(ratio=1.5)

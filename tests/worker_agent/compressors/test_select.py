from __future__ import annotations

from collections.abc import Callable, Iterable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.errors import ConfigError
from gradpilot.worker_agent.compressors import _select
from gradpilot.worker_agent.compressors._select import kept, largest

N = 600_001  # two chunks, the last one short


def gauss(n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


def ranking(x: Tensor) -> Tensor:
    """Return indices by falling magnitude, ties by index, NaN first."""
    magnitude = x.abs().double()
    magnitude[x.isnan()] = torch.inf
    magnitude[x.isinf()] = torch.finfo(torch.float64).max
    return magnitude.sort(descending=True, stable=True).indices


def check_against_sort(x: Tensor, ks: Iterable[int]) -> None:
    order = ranking(x)
    for k in ks:
        assert torch.equal(largest(x, k), order[:k].sort().values), f"k={k}"


def spike() -> Tensor:
    x = torch.zeros(N)
    x[555_555] = -5.0
    return x


def periodic() -> Tensor:
    """Return an array whose sampled elements are far larger than all others."""
    x = gauss()
    x[:: _select._STRIDE] *= 1e6
    return x


def hidden() -> Tensor:
    """Return an array whose sampled elements are zero."""
    x = gauss()
    x[:: _select._STRIDE] = 0.0
    return x


INPUTS: dict[str, Callable[[], Tensor]] = {
    "gauss": gauss,
    "heavy tail": lambda: gauss() ** 5,
    "all equal": lambda: torch.full((N,), -3.0),
    "zeros": lambda: torch.zeros(N),
    "signed zeros": lambda: torch.zeros(N).copysign(gauss()),
    "one spike": spike,
    "ascending": lambda: torch.arange(N, dtype=torch.float32),
    "descending": lambda: torch.arange(N, 0, -1, dtype=torch.float32),
    "few values": lambda: gauss().mul(3).round(),
    "sample too large": periodic,
    "sample too small": hidden,
    "front loaded": lambda: torch.cat([gauss(10_000) * 1e3, gauss(N - 10_000)]),
    "denormals": lambda: gauss() * 1e-40,
    "mostly zeros": lambda: gauss() * (gauss() > 2.0),
    "one infinity": lambda: gauss().index_fill_(0, torch.tensor([5]), -torch.inf),
}


@pytest.mark.parametrize("name", INPUTS)
def test_equals_the_exact_selection(name: str) -> None:
    check_against_sort(INPUTS[name](), (1, 600, 6000, 200_000))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 100, 200_000])
def test_every_dtype_and_size(dtype: torch.dtype, n: int) -> None:
    check_against_sort(gauss(n).to(dtype), {1, max(1, n // 100), n})


@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(
        st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0, torch.nan])),
        min_size=1,
        max_size=300,
    ),
    data=st.data(),
)
def test_equals_the_exact_selection_on_anything(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    # With the floor out of the way small inputs are filtered too, chunk by chunk.
    with (
        mock.patch.object(_select, "_FILTER_MIN_ELEMENTS", 1),
        mock.patch.object(_select, "_CHUNK_ELEMENTS", 64),
        mock.patch.object(_select, "_STRIDE", 3),
    ):
        check_against_sort(torch.tensor(values), [k])


@pytest.mark.parametrize("n", [100, N])
def test_nan_is_the_largest(n: int) -> None:
    x = gauss(n)
    x[3], x[n // 2] = torch.nan, -torch.nan
    assert largest(x, 2).tolist() == [3, n // 2]
    assert torch.equal(largest(torch.full((n,), torch.nan), 4), torch.arange(4))


def test_the_filter_is_used_where_it_helps() -> None:
    with mock.patch.object(torch, "topk", wraps=torch.topk) as topk:
        largest(gauss(), 6000)
        assert max(call.args[0].numel() for call in topk.call_args_list) < N // 50
        topk.reset_mock()
        largest(torch.zeros(N), 6000)
        assert max(call.args[0].numel() for call in topk.call_args_list) == N


def test_input_is_not_changed() -> None:
    x = gauss()
    before = x.clone()
    largest(x, 1000)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("n", "ratio", "k"), [(1, 0.001, 1), (7, 0.5, 3), (1000, 0.1, 100), (30, 0.1, 3), (5, 1.0, 5)]
)
def test_kept(n: int, ratio: float, k: int) -> None:
    assert kept(n, ratio) == k


def test_too_large_for_int32() -> None:
    with pytest.raises(ConfigError, match="use smaller buckets"):
        kept(1 << 31, 0.01)

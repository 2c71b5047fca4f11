from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradpilot.worker_agent.compressors import _sketch
from gradpilot.worker_agent.compressors._sketch import CountSketch, median

CPU = torch.device("cpu")


def shape(n: int, rows: int, columns: int, seed: int = 0) -> CountSketch:
    return CountSketch(n, rows, columns, torch.Generator().manual_seed(seed), CPU)


def read(made: CountSketch, sketch: Tensor) -> Tensor:
    return made.estimate(sketch, torch.full((made.n,), torch.nan))


@settings(deadline=None, max_examples=200)
@given(
    n=st.integers(1, 300),
    rows=st.sampled_from([1, 3, 5]),
    share=st.floats(0.0, 1.0),
    group=st.integers(1, 200),
    long=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_definition(
    n: int, rows: int, share: float, group: int, long: bool, seed: int
) -> None:
    columns = max(1, int(share * n))
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    # Small groups of blocks, so that their bounds are crossed; blocks as many or one at a time.
    with (
        mock.patch.object(_sketch, "_GROUP_ELEMENTS", group),
        mock.patch.object(_sketch, "_LONG", 1 if long else 1000),
    ):
        made = shape(n, rows, columns, seed)
        total = made.sketch(x)
        estimate = read(made, total)
    expected = torch.zeros(rows, columns)
    guesses = torch.zeros(rows, n)
    for i in range(n):
        block, c = divmod(i, columns)
        for row in range(rows):
            column = (c - int(made._offsets[row, block])) % columns
            expected[row, column] += made._signs[row, block] * x[i]
    for i in range(n):
        block, c = divmod(i, columns)
        for row in range(rows):
            column = (c - int(made._offsets[row, block])) % columns
            guesses[row, i] = made._signs[row, block] * total[row, column]
    assert torch.allclose(total, expected, atol=1e-5)
    assert torch.equal(estimate, guesses.median(0).values)


def test_sketches_add_up() -> None:
    made = shape(1000, 3, 70)
    x, y = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(made.sketch(x) + 2 * made.sketch(y), made.sketch(x + 2 * y), atol=1e-4)


def test_as_many_columns_as_elements_give_the_vector_back() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    made = shape(100, 3, 100)
    assert torch.equal(read(made, made.sketch(x)), x)


def test_an_estimate_is_unbiased_and_errs_as_one_of_hashes_does() -> None:
    # One row: variance (||x||^2 - x_i^2) / W, over elements that can meet.
    n, columns, draws = 400, 20, 4000
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    errors = torch.empty(draws, n)
    for seed in range(draws):
        made = shape(n, 1, columns, seed)
        errors[seed] = read(made, made.sketch(x)) - x
    deviation = float(x.square().sum() / columns) ** 0.5
    assert float(errors.mean(0).abs().max()) < 5 * deviation / draws**0.5
    assert float(errors.square().mean() ** 0.5) == pytest.approx(deviation, rel=0.05)


def test_the_median_ignores_a_row_with_a_giant() -> None:
    x = torch.zeros(300)
    x[7], x[200] = 1.0, 1e6
    wrong = [0, 0]
    for seed in range(200):
        for which, rows in enumerate((1, 3)):
            made = shape(300, rows, 10, seed)
            wrong[which] += float(read(made, made.sketch(x))[7]) != 1.0
    # A row meets the giant with probability 1/10, two of three with 0.028.
    assert 8 <= wrong[0] <= 34
    assert wrong[1] <= 14


@settings(deadline=None)
@given(
    rows=st.sampled_from([1, 3, 5, 7, 9]),
    data=st.data(),
)
def test_median_of_an_odd_number(rows: int, data: st.DataObject) -> None:
    numbers = st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4)
    values = [torch.tensor(data.draw(numbers)) for _ in range(rows)]
    expected = torch.stack(values).median(0).values
    assert torch.equal(median([v.clone() for v in values]), expected)


@pytest.mark.parametrize("where", [0, 1, 4])
def test_median_with_nan_is_nan(where: int) -> None:
    values = [torch.tensor([float(i)]) for i in range(5)]
    values[where].fill_(torch.nan)
    assert median(values).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_sketches_are_fp32_whatever_the_vector_is(dtype: torch.dtype) -> None:
    x = torch.arange(1.0, 101.0).to(dtype)
    made = shape(100, 3, 30)
    assert made.sketch(x).dtype == torch.float32
    assert torch.equal(made.sketch(x), made.sketch(x.float()))

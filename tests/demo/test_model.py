from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.demo.model import accuracy, checksum, learning_rate, make_model


def test_equal_seeds_give_equal_models() -> None:
    assert checksum(make_model(64, 10, 3)) == checksum(make_model(64, 10, 3))
    assert checksum(make_model(64, 10, 3)) != checksum(make_model(64, 10, 4))


def test_one_bit_changes_the_checksum() -> None:
    model = make_model(64, 10, 0)
    before = checksum(model)
    with torch.no_grad():
        last = list(model.parameters())[-1]
        last[-1] = torch.nextafter(last[-1], torch.tensor(torch.inf))
    assert checksum(model) != before


def test_size_is_as_promised() -> None:
    parameters = sum(p.numel() for p in make_model(784, 10, 0).parameters())
    assert 0.3e6 < parameters < 1e6


@settings(max_examples=50, deadline=None)
@given(st.integers(40, 2000), st.floats(1e-3, 1))
def test_the_rate_rises_then_falls_to_nearly_nothing(steps: int, peak: float) -> None:
    rates = [learning_rate(step, steps, peak) for step in range(steps)]
    top = rates.index(max(rates))
    assert all(a < b for a, b in itertools.pairwise(rates[: top + 1]))
    assert all(a >= b for a, b in itertools.pairwise(rates[top:]))
    assert 0 < rates[0] <= max(rates) <= peak * (1 + 1e-12)
    assert rates[-1] < 0.02 * peak


def test_accuracy_counts_hits() -> None:
    model = torch.nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    x = torch.eye(3)[[0, 1, 2, 0]]
    assert accuracy(model, x, torch.tensor([0, 1, 2, 1])) == 0.75
    assert model.training

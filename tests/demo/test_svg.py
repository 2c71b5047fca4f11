from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.demo.svg import Canvas, Scale, number

VALUES = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=20)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.booleans())
def test_values_lie_inside_and_in_order(values: list[float], log: bool) -> None:
    scale = Scale(values, 10.0, 500.0, log=log)
    places = [scale(v) for v in sorted(values)]
    assert all(10.0 <= p <= 500.0 for p in places)
    assert places == sorted(places)
    ticks = scale.ticks()
    assert all(scale.low <= t <= scale.high for t in ticks)
    assert len(ticks) <= 20


def test_what_cannot_be_drawn_is_left_out() -> None:
    scale = Scale([math.nan, math.inf, -1.0, 0.0, 5.0, 50.0], 0.0, 1.0, log=True)
    assert 3 < scale.low < 5
    assert 50 < scale.high < 70
    assert Scale([], 0.0, 1.0)(5.0) <= 1.0


@pytest.mark.parametrize(("low", "high"), [(13.0, 35.0), (20.0, 1200.0), (0.1, 30.0), (1.0, 1e6)])
def test_a_logarithmic_axis_has_enough_ticks(low: float, high: float) -> None:
    assert 3 <= len(Scale([low, high], 0.0, 1.0, log=True).ticks()) <= 9


def test_a_zero_scale_begins_at_zero() -> None:
    assert Scale([3.0, 9.0], 0.0, 90.0, zero=True)(0.0) == 0.0


def test_texts_are_escaped() -> None:
    canvas = Canvas('a "b" <c> & d', 100.0)
    canvas.text(1, 2, "<script>&")
    canvas.circle(1, 2, 3, 'class="x"', "<tip>")
    root = ElementTree.fromstring(canvas.render())
    assert root.get("aria-label") == 'a "b" <c> & d'
    assert [e.text for e in root.iter("text")] == ["<script>&"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.1, "0.1"), (1000.0, "1,000"), (20, "20"), (2e7, "2e+07"), (1e-6, "1e-06")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text

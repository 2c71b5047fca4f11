from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gradpilot.policies.compute import FamilyKey
from gradpilot.policies.correction import (
    CAUTION,
    FADED_STEPS,
    HALF_LIFE_STEPS,
    REMEMBERED,
    Bounds,
    Corrections,
    Live,
)
from gradpilot.policies.history import GainRecord

TOPK = ("topk", ())


def record(factor: float, ratio: float = 0.01, step: int = 1000) -> GainRecord:
    return GainRecord("topk", (), ratio, factor, step)


def factors(
    *records: GainRecord, live: Live | None = None, step: int = 1000, at: float = 0.01
) -> list[float]:
    made = Corrections({TOPK: live} if live else {}, records, step, 2).factors(TOPK, np.array([at]))
    return [] if made is None else list(made[0])


def test_nothing_is_known_of_other_families() -> None:
    made = Corrections({}, [record(0.5)], 1000, 2)
    assert made.factors(("artopk", ()), np.array([0.01])) is None
    assert factors() == []


def test_a_record_holds_for_the_whole_family_and_fades() -> None:
    for at in (0.001, 0.01, 0.5):
        assert factors(record(0.5), at=at) == pytest.approx([0.5, 0.5])
    assert factors(record(0.5), step=1000 + HALF_LIFE_STEPS) == pytest.approx([0.5**0.5] * 2)
    assert factors(record(0.5), step=1000 + 2 * HALF_LIFE_STEPS) == pytest.approx([0.5**0.25] * 2)
    assert factors(record(0.5), step=1000 + FADED_STEPS + 1) == []
    assert factors(record(0.5), step=900) == pytest.approx([0.5, 0.5])  # from the future


def test_between_two_records_it_is_interpolated() -> None:
    pair = (record(0.25, 0.001), record(1.0, 0.1))
    assert factors(*pair, at=0.01) == pytest.approx([0.5, 0.5])
    assert factors(*pair, at=0.5) == pytest.approx([1.0, 1.0])


def test_what_is_measured_now_counts_more_than_what_is_remembered() -> None:
    live = Live((0.01,), np.log([0.8, 0.4]))
    assert factors(record(0.1), live=live) == pytest.approx([0.8, 0.4])
    assert factors(record(0.2, 0.1), live=live, at=0.1) == pytest.approx([0.2, 0.2])
    # Of what fades away at another ratio the rest is the family's own present factor.
    faded = factors(record(0.2, 0.1), live=live, at=0.1, step=1000 + HALF_LIFE_STEPS)
    assert faded == pytest.approx([(0.2 * 0.8) ** 0.5, (0.2 * 0.4) ** 0.5])


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(1e-4, 1), st.integers(0, 3000)), max_size=6),
    st.floats(1e-6, 1),
)
def test_it_is_bounded(known: list[tuple[float, float, int]], at: float) -> None:
    least, most = REMEMBERED
    for factor in factors(*(record(*values) for values in known), step=2000, at=at):
        assert least * (1 - 1e-9) <= factor <= most * (1 + 1e-9)


# --- bounds --------------------------------------------------------------------------------------


def most(*records: GainRecord, using: tuple[float, ...] = (), step: int = 1000) -> list[float]:
    live: dict[FamilyKey, Live] = {TOPK: Live(using, np.zeros(2))} if using else {}
    found = Bounds(live, records, step).most(TOPK, np.array([0.005, 0.01, 0.012, 0.04]))
    return [] if found is None else list(found)


def test_a_gain_that_fell_below_the_floor_bounds_the_family_there_and_below() -> None:
    missed = GainRecord("topk", (), 0.01, 0.9, 1000, missed=0.28)
    least = 0.28 / (1 + CAUTION)
    assert most(missed) == pytest.approx([least, least, 1.2 * least, 4 * least])
    assert most(missed, step=1000 + FADED_STEPS) == most(missed)  # it does not fade
    assert most(missed, step=1001 + FADED_STEPS) == []
    assert most(record(0.9)) == []


def test_of_several_bounds_the_least_holds() -> None:
    pair = (
        GainRecord("topk", (), 0.01, 0.9, 1000, missed=0.28),
        GainRecord("topk", (), 0.012, 0.9, 1000, missed=0.2),
    )
    assert most(*pair)[:3] == pytest.approx([0.2 / (1 + CAUTION)] * 3)


def test_where_it_is_in_use_what_is_measured_now_counts() -> None:
    missed = GainRecord("topk", (), 0.01, 0.9, 1000, missed=0.28)
    assert most(missed, using=(0.01,)) == []
    assert len(most(missed, using=(0.02,))) == 4

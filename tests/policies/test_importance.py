from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.errors import ConfigError
from gradpilot.policies.importance import ENTER, LEAVE, Importance, measure, top_shares

LOUD, QUIET = [0, 0, 0, 100], [100, 100, 100, 0]


def test_the_share_is_the_part_of_own_elements_in_the_global_top_quarter() -> None:
    assert top_shares([LOUD, QUIET]) == [1.0, 0.0]
    # The top quarter of 800 needs 200: all 100 of the last bin, and half of the one before.
    assert top_shares([[0, 0, 100, 100], [200, 300, 100, 0]]) == [0.75, pytest.approx(1 / 12)]


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.lists(st.integers(0, 1000), min_size=5, max_size=5), min_size=1, max_size=6),
    top=st.floats(0.01, 0.99),
)
def test_shares_weighted_by_elements_are_the_top(rows: list[list[int]], top: float) -> None:
    shares = np.array(top_shares(rows, top))
    elements = np.array(rows).sum(axis=1)
    assert ((shares >= 0) & (shares <= 1 + 1e-12)).all()
    assert float(shares @ elements) == pytest.approx(top * elements.sum())


def test_agrees_with_a_sort_of_the_magnitudes() -> None:
    generator = np.random.default_rng(0)
    scales = (0.01, 1.0, 7.0)
    data = [np.abs(generator.normal(0, s, 20_000)) for s in scales]
    edges = 2.0 ** np.arange(-30, 10)
    rows = [np.histogram(x, edges)[0].tolist() for x in data]
    bound = np.quantile(np.concatenate(data), 0.75)
    exact = [float((x > bound).mean()) for x in data]
    # Bins are a factor of two wide, and the density is not flat within the one of the bound.
    assert top_shares(rows) == pytest.approx(exact, abs=0.05)


def test_nothing_measured_is_nothing_protected() -> None:
    assert top_shares([]) == []
    assert top_shares([[0, 0], [0, 0]]) == [0.0, 0.0]
    assert measure(Importance(), [], []).protected == ()


@pytest.mark.parametrize("top", [0.0, 1.0, float("nan")])
def test_a_senseless_top_is_refused(top: float) -> None:
    with pytest.raises(ConfigError, match="top must lie"):
        top_shares([LOUD], top)


def test_rows_of_different_bins_are_refused() -> None:
    with pytest.raises(ConfigError, match="same bins"):
        top_shares([LOUD, [1, 2]])


def test_hysteresis_keeps_a_bucket_between_the_bounds() -> None:
    between = int(1000 * (ENTER + LEAVE) / 2)

    def rows(share: int) -> list[list[int]]:
        """Two equal buckets of which the first holds ``share`` of 500 large elements."""
        return [[1000 - share, share], [500 + share, 500 - share]]

    outside = measure(Importance(), ["a", "b"], rows(between))
    assert outside.protected == ()
    state = measure(Importance(), ["a", "b"], rows(500))
    assert state.protected == ("a",)
    for _ in range(30):
        state = measure(state, ["a", "b"], rows(between))
        assert state.protected == ("a",)
        assert state.overlap == 1.0
    for _ in range(30):
        state = measure(state, ["a", "b"], rows(250))
    assert state.protected == ()


def test_a_changed_set_shows_in_the_overlap_and_the_first_choice_can_be_kept() -> None:
    for once in (False, True):
        state = measure(Importance(), ["a", "b"], [LOUD, QUIET], once=once)
        assert state.protected == ("a",)
        overlaps = []
        for _ in range(20):
            state = measure(state, ["a", "b"], [QUIET, LOUD], once=once)
            overlaps.append(state.since_first)
        assert state.protected == (("a",) if once else ("b",))
        assert overlaps[0] == 1.0
        assert state.since_first == 0.0


def test_a_new_layout_starts_from_its_own_shares() -> None:
    state = measure(Importance(), ["a", "b"], [LOUD, QUIET])
    state = measure(state, ["c", "b"], [LOUD, QUIET])
    assert [s.bucket for s in state.shares] == ["c", "b"]
    assert state.protected == ("c",)

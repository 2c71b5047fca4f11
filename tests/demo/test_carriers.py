from __future__ import annotations

from dataclasses import replace

import pytest

from gradpilot.demo.carriers import ALL_GATHER, ALL_REDUCE, carrier, favoured, wire_seconds
from gradpilot.demo.schedule import Phase
from gradpilot.protos.messages import BF16, DENSE, Option
from tests.demo.planted import ELEMENTS, FAST, SLOW, TOPK, candidate, decision

STAR_RING = Option("artopk", 0.01, "ring")


def test_wire_seconds_by_hand() -> None:
    phase = Phase("x", 0, 1e-3, 8e6)  # beta = 1 us a byte
    assert wire_seconds(DENSE, (1000,), phase, 4) == pytest.approx(12e-3 + 1.5 * 4000e-6)
    assert wire_seconds(TOPK, (1000,), phase, 4) == pytest.approx(6e-3 + 3 * 80e-6)
    ring = Option("none", 1.0, "ring", skip=2)
    assert wire_seconds(ring, (2000,), phase, 4) == pytest.approx(5e-3 + 8000e-6)
    # Our broadcast of 40 bytes, then our ring.
    expected = 4e-3 + 1.5 * 40e-6 + 7e-3 + 1.5 * 40e-6
    assert wire_seconds(STAR_RING, (1000,), phase, 4) == pytest.approx(expected)


def test_buckets_add_up() -> None:
    parts = sum(wire_seconds(BF16, (n,), SLOW, 4) for n in ELEMENTS)
    assert wire_seconds(BF16, ELEMENTS, SLOW, 4) == pytest.approx(parts)


def test_carriers() -> None:
    assert carrier((TOPK,)) == carrier((BF16, TOPK)) == ALL_GATHER
    assert carrier((BF16,)) == carrier((STAR_RING,)) == ALL_REDUCE


def test_the_true_link_decides_not_the_estimate() -> None:
    # Both times the same candidates with the same predictions.
    assert favoured(decision(1, 0, BF16, FAST), 0.02, ELEMENTS, FAST, 4) == ALL_REDUCE
    assert favoured(decision(1, 0, BF16, FAST), 0.02, ELEMENTS, SLOW, 4) == ALL_GATHER


def test_poor_efficiency_counts_against_a_candidate() -> None:
    poor = replace(decision(1, 0, BF16, SLOW), front=(candidate(TOPK, 0.03, 0.05),))
    poor = replace(poor, chosen=candidate(BF16, 0.3, 1.0))
    assert favoured(poor, 0.02, ELEMENTS, SLOW, 4) == ALL_REDUCE


def test_without_candidates_nothing_is_favoured() -> None:
    empty = replace(decision(1, 0, BF16, FAST), front=(), chosen=None)
    assert favoured(empty, 0.02, ELEMENTS, FAST, 4) == ""

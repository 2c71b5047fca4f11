from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gradpilot.demo.records import Accuracy, Switch
from gradpilot.demo.result import Runs, build
from gradpilot.protos.messages import LinkEstimate
from tests.demo import schema
from tests.demo.planted import SLOW, TOPK, out_of_sync, runs


def _claims(of: Runs) -> dict[str, dict[str, Any]]:
    return {claim["name"].split(":")[0].split(",")[0]: claim for claim in build(of, 1.0)["claims"]}


def test_shape_and_strict_json() -> None:
    result = build(runs(), 12.5)
    schema.check(result)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_numbers_are_those_of_the_records() -> None:
    result = build(runs(), 12.5)
    assert result["link"] == "emulated"
    assert result["steps"] == 120
    assert result["seconds"] == pytest.approx(85 * 0.04 + 35 * 0.08)
    assert result["baseline_seconds"] == pytest.approx(85 * 0.04 + 35 * 0.4)
    assert result["final_accuracy"] == result["baseline_accuracy"] == 0.97
    assert result["elapsed_seconds"] == 12.5
    assert result["switches"] == 2  # the first plan only confirmed what was in force
    assert result["decisions_taken"] == 4
    assert [d["plan_id"] for d in result["decisions"]] == [1, 3, 4]
    assert [d["in_force_from"] for d in result["decisions"]] == [10, 45, 85]


def test_phases_say_what_happened_in_them() -> None:
    fast, slow, last = build(runs(), 1.0)["phases"]
    assert (slow["first_step"], slow["last_step"]) == (40, 79)
    assert slow["options"] == [TOPK.label]
    assert slow["steps_to_first_switch"] == 5
    assert slow["step_seconds"] == pytest.approx(0.08)
    assert slow["baseline_step_seconds"] == pytest.approx(0.4)
    assert slow["estimate"]["bits_per_second"] == pytest.approx(50e6)
    assert fast["seconds"] == pytest.approx(1.6)
    assert last["options"] == ["bf16 native"]


def test_claims_hold_where_they_should() -> None:
    claims = _claims(runs())
    failing = [name for name, claim in claims.items() if not claim["holds"]]
    assert failing == ["plan switches that changed options"]  # two of three
    assert claims["estimated bandwidth against the emulated one"]["measured"] == "+0.0 %"
    assert (
        claims["decisions for all-gather where the cost model favours it on the emulated link"][
            "measured"
        ]
        == 1
    )


def test_out_of_sync_is_seen() -> None:
    odd = out_of_sync()
    assert not odd.in_sync
    assert not build(odd, 1.0)["in_sync"]
    claim = _claims(odd)["all ranks in sync"]
    assert claim["measured"] == "11 of 12"
    assert not claim["holds"]


def test_other_plans_on_one_rank_are_out_of_sync() -> None:
    good = runs()
    late = replace(good.adaptive[1], switches=(*good.adaptive[1].switches, Switch(99, 9, ("x",))))
    assert not replace(good, adaptive=(good.adaptive[0], late, *good.adaptive[2:])).in_sync


def test_a_lost_point_and_lost_time_are_reported() -> None:
    good = runs()
    first = good.adaptive[0]
    worse = replace(
        first,
        accuracy=(*first.accuracy[:-1], Accuracy(119, 9.0, 0.95)),
        step_seconds=tuple(10 * s for s in first.step_seconds),
    )
    claims = _claims(replace(good, adaptive=(worse, *good.adaptive[1:])))
    assert claims["final accuracy less that of static bf16"]["measured"] == -2.0
    assert not claims["final accuracy less that of static bf16"]["holds"]
    assert not claims["training time over that of static bf16"]["holds"]


@pytest.mark.parametrize(("factor", "holds"), [(1.1, True), (1.3, False), (0.8, False)])
def test_a_wrong_estimate_is_reported(factor: float, holds: bool) -> None:
    good = runs()
    link = LinkEstimate(SLOW.latency_seconds, SLOW.beta * factor)
    changed = tuple((replace(d, link=link) if d.step == 42 else d, c) for d, c in good.decisions)
    claim = _claims(replace(good, decisions=changed))
    assert claim["estimated bandwidth against the emulated one"]["holds"] is holds


def test_a_choice_against_the_true_link_does_not_count() -> None:
    good = runs()
    # All-gather chosen in the fast phase, where all-reduce is cheaper.
    moved = tuple((replace(d, step=5) if d.id == 3 else d, c) for d, c in good.decisions)
    name = "decisions for all-gather where the cost model favours it on the emulated link"
    assert not _claims(replace(good, decisions=moved))[name]["holds"]


def test_no_decisions_make_a_result_that_claims_nothing() -> None:
    silent = replace(runs(), decisions=())
    result = build(silent, 1.0)
    schema.check(result)
    assert result["decisions"] == []
    assert _claims(silent)["estimated bandwidth against the emulated one"]["measured"] == (
        "no estimate"
    )

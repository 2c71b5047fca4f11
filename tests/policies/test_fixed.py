from __future__ import annotations

from gradpilot.policies.base import POLICIES, Outcome
from gradpilot.protos.messages import BF16, DENSE, Option
from tests.policies import scenario


def decide(fixed: Option, **fields: object) -> Outcome:
    inputs = scenario.inputs(settings=scenario.settings(fixed=fixed), **fields)  # type: ignore[arg-type]
    return POLICIES.get("fixed")().decide(inputs)


def test_registered() -> None:
    assert {"adaptive", "fixed"} <= set(POLICIES.names())


def test_switches_once() -> None:
    assert decide(BF16).options == (BF16,) * 3
    assert decide(BF16, current=DENSE).outcome == "switch"
    kept = decide(BF16, current=BF16)
    assert (kept.outcome, kept.options) == ("keep", ())


def test_refuses_what_cannot_work() -> None:
    assert "ratio" in decide(Option("topk", 2.0, "allgather")).reason
    assert "cannot do" in decide(Option("unheard")).reason
    assert "cannot do" in decide(Option("topk", 0.01, "native")).reason
    assert decide(Option("topk", 0.01, "allgather")).outcome == "switch"
    assert decide(BF16, layout=scenario.layout(()), buckets=()).outcome == "keep"
    assert decide(BF16, families=()).outcome == "switch"

from __future__ import annotations

import pytest

from gradpilot.errors import ConfigError, UnknownNameError
from gradpilot.protos.messages import BF16, DENSE, Assignment, Option, Plan
from gradpilot.worker_agent.compressors.topk import TopK
from gradpilot.worker_agent.plan import ActivePlan, compile_option, safe_plan

TOPK = Option("topk", 0.1, "allgather")


def _plan(*options: Option, default: Option = DENSE) -> Plan:
    assigned = tuple(Assignment(f"b{i}", option) for i, option in enumerate(options))
    return Plan(2, 5, "layout", assigned, default)


def test_each_bucket_gets_its_option_and_the_rest_the_default() -> None:
    active = ActivePlan(_plan(TOPK, BF16), world_size=4)
    assert active.given("b0").compressor == TopK(ratio=0.1)
    assert active.given("b1").option == BF16
    assert active.given("unknown").option == DENSE


def test_a_plan_is_native_if_every_bucket_is_one_all_reduce_of_the_backend() -> None:
    assert ActivePlan(_plan(DENSE, BF16), 4).native
    assert not ActivePlan(_plan(BF16, TOPK), 4).native
    assert not ActivePlan(_plan(Option(collective="ring")), 4).native
    # Unknown buckets count too: they may appear in any step.
    assert not ActivePlan(_plan(DENSE, default=TOPK), 4).native
    # On CUDA only what keeps no residual is.
    assert ActivePlan(_plan(DENSE), 4, "cuda").native
    assert not ActivePlan(_plan(BF16), 4, "cuda").native


def test_residuals_are_kept_but_for_what_is_sent_whole() -> None:
    assert not compile_option(DENSE, 4).feedback
    assert not compile_option(Option(collective="ring", skip=1), 4).feedback
    assert compile_option(Option(collective="ring", skip=1, skip_feedback=True), 4).feedback
    assert compile_option(BF16, 4).feedback
    assert compile_option(TOPK, 4).feedback


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        (Option("tpok"), UnknownNameError, "unknown compressor 'tpok'; known: .*topk"),
        (Option("topk", 0.1, "native"), ConfigError, "can be carried by allgather"),
        (Option("topk", 0.0, "allgather"), ConfigError, "ratio"),
        (Option(collective="ring", skip=4), ConfigError, "skip must lie in 0..3 for 4 ranks"),
        (Option(collective="no_such_way"), ConfigError, "can be carried by native"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(
    option: Option, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        ActivePlan(_plan(option), world_size=4)


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="interval"):
        ActivePlan(Plan(1, 1, "layout", interval=0), world_size=2)


def test_the_safe_plan_is_bf16_and_older_than_any_new_one() -> None:
    plan = _plan(TOPK)
    safe = safe_plan(plan)
    assert safe.options() == (BF16,)
    assert safe.key == plan.key < (2, 6)
    assert ActivePlan(safe, 4).native

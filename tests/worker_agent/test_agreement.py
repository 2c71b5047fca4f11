"""All ranks switch at the same step or none does, whatever fails on one of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from gradpilot.errors import AgreementLostError, ConfigError
from gradpilot.protos.messages import BF16, Assignment, Plan, ProbeRequest
from gradpilot.worker_agent import groups
from gradpilot.worker_agent.agreement import Agreement, Row, Verdict, control_timeout
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes

TIMEOUT = 2.0


def _plan(number: int, term: int = 1) -> Plan:
    return Plan(term, number, "layout", (Assignment("b", BF16),), interval=7, reason="test")


def _row(step: int = 10, **fields: Any) -> Row:
    values: dict[str, Any] = {
        "version": "1",
        "layout": "layout",
        "active": (1, 3),
        "held": None,
        "controller_lost": False,
        "probe": None,
    }
    return Row(step=step, **{**values, **fields})


def _agreement(check: Callable[[Plan], None] = lambda plan: None) -> Agreement:
    group = groups.acquire([*range(dist.get_world_size())], "gloo", control_timeout(TIMEOUT))
    store = dist.distributed_c10d._get_default_store()
    return Agreement(group, store, "test", TIMEOUT, check)


def _exchange(agreement: Agreement, row: Row) -> Verdict:
    agreement.start(row)
    return agreement.finish()


# --- what the rows ask for -----------------------------------------------------------------------


def _rows(rank: int, rows: list[list[dict[str, Any]]]) -> list[Verdict]:
    agreement = _agreement()
    verdicts = [_exchange(agreement, _row(10 + i, **r[rank])) for i, r in enumerate(rows)]
    assert agreement.close()
    return verdicts


def test_rows_decide_alike_on_all_ranks() -> None:
    older, newer = _plan(4), _plan(5)
    probe = ProbeRequest(1, 4096, 1 << 20)
    cases: list[tuple[list[dict[str, Any]], Verdict]] = [
        # One rank holds a plan, another one a newer one: the newest wins, also over other wishes.
        ([{}, {"held": older}, {"held": newer, "probe": probe}], Verdict(plan=newer)),
        ([{"held": newer}, {"held": newer}, {"controller_lost": True}], Verdict(plan=newer)),
        # A higher term is newer whatever the number.
        ([{}, {"held": newer}, {"held": _plan(1, term=2)}], Verdict(plan=_plan(1, term=2))),
        # What is in force already is not news.
        ([{"held": _plan(3)}, {"held": _plan(2)}, {}], Verdict()),
        ([{}, {}, {}], Verdict()),
        # The safe plan and a probe need all ranks.
        ([{"controller_lost": True}] * 2 + [{}], Verdict()),
        ([{"controller_lost": True}] * 3, Verdict(safe=True)),
        ([{"probe": probe}] * 2 + [{}], Verdict()),
        ([{"probe": probe}] * 3, Verdict(probe=probe)),
        ([{"probe": probe}] * 2 + [{"probe": ProbeRequest(2, 4096, 1 << 20)}], Verdict()),
    ]
    for verdicts in run_ranks(_rows, 3, [rows for rows, _ in cases]):
        assert verdicts == [expected for _, expected in cases]


@pytest.mark.parametrize("odd", [{"layout": "other"}, {"version": "2"}, {"active": (1, 2)}])
def test_ranks_that_differ_freeze_with_a_reason(odd: dict[str, Any]) -> None:
    rows = [[{"held": _plan(9)}, odd, {}], [{"held": _plan(9)}, {}, {}]]
    for first, second in run_ranks(_rows, 3, rows):
        assert first.plan is None
        assert "ranks [1] differ" in first.error
        assert second == Verdict(), "no further exchange takes place"


def _refusing(rank: int) -> list[Verdict]:
    def check(plan: Plan) -> None:
        if rank == 1 and plan.id == 4:
            raise ConfigError("this rank cannot")

    agreement = _agreement(check)
    held = [_plan(4) if rank == 0 else None, _plan(5) if rank == 2 else None]
    return [_exchange(agreement, _row(10 + i, held=plan)) for i, plan in enumerate(held)]


def test_a_plan_that_one_rank_cannot_carry_out_is_taken_by_none() -> None:
    for rank, (first, second) in enumerate(run_ranks(_refusing, 3)):
        assert first.plan is None
        assert first.rejected == ("this rank cannot" if rank == 1 else first.rejected) != ""
        assert second == Verdict(plan=_plan(5)), "later plans are not affected"


# --- failures ------------------------------------------------------------------------------------


def _failing(rank: int, stage: str) -> tuple[Verdict | str, float]:
    agreement = _agreement()
    if rank == 1:

        def fail(*_: object) -> Any:
            raise RuntimeError("planted")

        setattr(agreement, stage, fail)
    begun = time.monotonic()
    result: Verdict | str
    try:
        result = _exchange(agreement, _row(held=_plan(4)))
    except AgreementLostError as error:
        result = str(error)
    return result, time.monotonic() - begun


@pytest.mark.parametrize("stage", ["_gather", "_fetch", "_all_agree"])
def test_a_failure_on_one_rank_before_the_verdict_ends_alike_everywhere(stage: str) -> None:
    for verdict, seconds in run_ranks(_failing, 3, stage):
        assert isinstance(verdict, Verdict)
        assert verdict.plan is None
        assert verdict.error
        assert seconds < 4 * TIMEOUT


def _late(rank: int) -> Verdict:
    """Rank 1 votes, and its connection breaks before it has the verdict."""
    agreement = _agreement()
    if rank == 1:
        vote = agreement._all_agree

        def broken(agree: bool) -> bool:
            vote(agree)
            time.sleep(0.5)  # the others are through
            raise RuntimeError("planted")

        agreement._all_agree = broken  # type: ignore[method-assign]
    return _exchange(agreement, _row(held=_plan(4) if rank == 0 else None))


def test_a_rank_that_missed_the_verdict_learns_it_from_the_store() -> None:
    for rank, verdict in enumerate(run_ranks(_late, 3)):
        assert verdict.plan == _plan(4)
        assert bool(verdict.error) == (rank == 1), "it takes part in no further exchange"


class _BrokenStore:
    def compare_set(self, *_: object) -> bytes:
        raise RuntimeError("no route")


def _cut_off(rank: int) -> str:
    agreement = _agreement()
    if rank == 1:
        agreement._store = _BrokenStore()  # type: ignore[assignment]
    try:
        verdict = _exchange(agreement, _row(held=_plan(4)))
    except AgreementLostError as error:
        return str(error)
    return f"switched to {verdict.plan.id}" if verdict.plan else "stayed"


def test_a_rank_that_cannot_learn_the_verdict_stops_and_says_why() -> None:
    first, second, third = run_ranks(_cut_off, 3)
    assert first == third == "switched to 4"
    assert "cannot be learned" in second
    assert "no route" in second


def _waiting(rank: int) -> float:
    """Rank 2 never starts its exchange; the others must not wait longer than the bound."""
    agreement = _agreement()
    begun = time.monotonic()
    if rank != 2:
        verdict = _exchange(agreement, _row(held=_plan(4)))
        assert verdict.plan is None
        assert verdict.error
    return time.monotonic() - begun


def test_a_rank_that_never_comes_delays_the_others_by_a_bounded_time() -> None:
    assert max(run_ranks(_waiting, 3)) < 4 * TIMEOUT


def test_the_control_timeout_is_bounded() -> None:
    assert control_timeout(0.01).total_seconds() == 1.0
    assert control_timeout(100.0).total_seconds() == 15.0

from __future__ import annotations

from dataclasses import replace

from gradpilot.controller.plans import (
    MAX_NUMBER,
    PATIENCE_DECISION_STEPS,
    PATIENCE_SECONDS,
    PlanBook,
    dominant,
    plan_label,
)
from gradpilot.protos.messages import (
    BF16,
    DENSE,
    START_INTERVAL,
    Assignment,
    Bucket,
    Layout,
    Plan,
)
from tests.controller.fakes import layout


def made(id_: int, layout_: str = "a", term: int = 1, **fields: object) -> Plan:
    return Plan(term=term, id=id_, layout=layout_, **fields)  # type: ignore[arg-type]


def test_numbers_go_on_above_everything_that_was_seen() -> None:
    book = PlanBook()
    assert book.next_id == 1
    book.remember(made(7))
    book.number(3)
    assert book.next_id == 8
    book.clear()
    assert book.next_id == 8
    book.number(MAX_NUMBER)  # nobody's
    assert book.next_id == 8


def test_the_newest_plan_is_that_of_the_layout() -> None:
    book = PlanBook()
    for plan in (made(3), made(2, term=2), made(9, "b")):
        book.remember(plan)
    assert book.newest is None
    book.use_layout("a")
    assert book.newest == made(2, term=2)  # a later term beats a higher number
    assert book.get((1, 9)) is None  # for another layout
    book.use_layout("")
    assert book.newest is None


def test_a_plan_for_a_layout_that_is_gone_is_not_the_newest() -> None:
    book = PlanBook()
    book.use_layout("b")
    assert not book.sent(made(1, "a"), 0.0)
    assert book.newest is None
    assert book.sent(made(2, "b"), 0.0)
    assert book.newest == made(2, "b")


def test_a_ranks_own_copy_replaces_ours() -> None:
    book = PlanBook()
    book.use_layout("a")
    book.sent(made(1), 0.0)
    safe = made(1, default=BF16, policy="safe")
    book.remember(safe)
    assert book.newest == safe
    assert book.get((1, 1)) == safe


def test_windows_on_the_way_to_a_plan_do_not_count_until_it_is_lost() -> None:
    book = PlanBook()
    book.use_layout("a")
    assert book.usable((0, 0), 0.0, 1.0)
    book.sent(made(1, interval=50), 100.0)
    assert book.usable((1, 1), 100.0, 1.0)
    assert not book.usable((0, 0), 100.0 + PATIENCE_SECONDS + 1, 1.0)
    assert book.usable((0, 0), 101.0 + 50 * PATIENCE_DECISION_STEPS, 1.0)
    assert book.usable((0, 0), 101.0 + PATIENCE_SECONDS, 0.01)


def test_a_void_plan_gives_way_to_the_one_in_force() -> None:
    book = PlanBook()
    book.use_layout("a")
    book.sent(made(1), 0.0)
    book.sent(made(2), 0.0)
    assert not book.void((1, 1), None)
    assert book.void((1, 2), made(1))
    assert book.newest == made(1)
    assert book.get((1, 2)) is None


def test_the_dominant_option_has_most_elements() -> None:
    of = Layout.of((Bucket("small", 0, 10), Bucket("large", 1, 100), Bucket("tiny", 2, 1)))
    plan = replace(
        made(1, of.digest),
        assignments=(
            Assignment("small", BF16),
            Assignment("large", DENSE),
            Assignment("tiny", BF16),
        ),
    )
    assert dominant(plan, of) == DENSE
    assert dominant(plan, None) == BF16
    assert dominant(made(1, default=BF16), layout()) == BF16
    assert plan_label(plan) == "bf16 native and 1 more"


def test_ranks_switch_at_a_decision_step_of_the_plan_that_they_leave() -> None:
    """So however short that of the new plan is, they get the time that the old one needs."""
    book = PlanBook()
    book.use_layout("a")
    book.sent(made(1, interval=20), 0.0)
    book.sent(made(2, interval=1), 100.0)
    assert not book.usable((1, 1), 100.0 + PATIENCE_SECONDS + 1, 3.0)
    assert book.usable((1, 1), 101.0 + 20 * 3.0 * PATIENCE_DECISION_STEPS, 3.0)
    assert not book.usable((0, 0), 100.0 + PATIENCE_SECONDS + 1, 6.0)  # that of the start
    assert book.usable((0, 0), 101.0 + START_INTERVAL * 6.0 * PATIENCE_DECISION_STEPS, 6.0)

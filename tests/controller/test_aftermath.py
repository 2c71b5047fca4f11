from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gradpilot.controller.aftermath import LOOKS, Aftermath
from gradpilot.protos.explanations import Since
from gradpilot.protos.messages import BF16, DENSE, Decision
from tests.controller import fakes

NOW = replace(fakes.candidate(DENSE, 0.4), efficiency=0.8)
CHOSEN = replace(fakes.candidate(BF16, 0.2), efficiency=0.5)


def decision(id_: int, **fields: object) -> Decision:
    values = {"chosen": CHOSEN, "current": NOW, **fields}
    return Decision("r", "m", 1, id_, 10, 0.0, "p", "switch", "", **values)  # type: ignore[arg-type]


def sent(aftermath: Aftermath, id_: int, undoes: str = "", **fields: object) -> None:
    aftermath.sent(Aftermath.begin(decision(id_, **fields), "dense", 0.5, undoes))


def found(aftermath: Aftermath, id_: int) -> Since:
    since = aftermath.find(id_)
    assert since is not None
    return since


def test_a_plan_is_followed_from_the_first_step_under_it() -> None:
    aftermath = Aftermath()
    sent(aftermath, 3)
    aftermath.look(2, 0, 50, 0.5, 1.0)  # still the one before, of which nothing is known
    assert found(aftermath, 3).first_step == -1
    assert math.isnan(found(aftermath, 3).measured_seconds)
    for last, seconds, gain in ((69, 0.3, 0.7), (89, 0.2, -1.0), (109, 0.25, -1.0)):
        aftermath.look(3, 60, last, seconds, gain)
    since = found(aftermath, 3)
    assert (since.before, since.before_seconds, since.before_efficiency) == ("dense", 0.5, 0.8)
    assert (since.predicted_seconds, since.predicted_efficiency) == (0.2, 0.5)
    assert (since.first_step, since.last_step, since.steps) == (60, 109, 50)
    assert since.measured_seconds == 0.25
    assert since.gain == 0.7
    assert since.end == ""


def test_the_same_window_counts_once_and_memory_is_bounded() -> None:
    aftermath = Aftermath()
    sent(aftermath, 1)
    for last in range(2 * LOOKS):
        for _ in range(3):
            aftermath.look(1, 0, last, float(1 + last), -1.0)
    assert found(aftermath, 1).measured == tuple(map(float, range(LOOKS + 1, 2 * LOOKS + 1)))
    aftermath.look(1, 0, 999, 0.0, -1.0)
    aftermath.look(1, 0, 999, math.nan, -1.0)
    assert found(aftermath, 1).last_step == 2 * LOOKS - 1


@pytest.mark.parametrize(("undoes", "end"), [("", "replaced"), ("cost", "undone")])
def test_the_next_plan_ends_it_once_the_ranks_take_it(undoes: str, end: str) -> None:
    aftermath = Aftermath()
    sent(aftermath, 1)
    aftermath.look(1, 0, 9, 0.3, -1.0)
    sent(aftermath, 2, undoes)
    assert found(aftermath, 1).end == ""
    aftermath.look(1, 0, 19, 0.3, -1.0)
    aftermath.look(2, 20, 29, 0.2, -1.0)
    old, new = found(aftermath, 1), found(aftermath, 2)
    assert (old.end, old.cause, old.ended_by) == (end, undoes, 2)
    assert old.last_step == 19
    assert (new.first_step, new.end, new.undoes) == (20, "", undoes)
    assert {one.id for one in aftermath.records()} == {1, 2}
    aftermath.stored()
    assert {one.id for one in aftermath.records()} == {2}


def test_a_plan_that_the_ranks_turn_down_ends_nothing() -> None:
    aftermath = Aftermath()
    sent(aftermath, 1)
    aftermath.look(1, 0, 9, 0.3, -1.0)
    sent(aftermath, 2, "cost")
    sent(aftermath, 3)
    aftermath.look(1, 0, 19, 0.3, -1.0)
    assert found(aftermath, 1).last_step == 19
    assert aftermath.find(2) is None
    aftermath.look(3, 20, 29, 0.3, -1.0)
    assert (found(aftermath, 1).end, found(aftermath, 1).ended_by) == ("replaced", 3)


def test_it_goes_on_from_what_is_stored() -> None:
    first = Aftermath()
    sent(first, 1)
    first.look(1, 0, 9, 0.3, -1.0)
    sent(first, 2, "loss")
    again = Aftermath(first.records())
    again.look(2, 10, 19, 0.2, -1.0)
    assert (found(again, 1).end, found(again, 1).cause) == ("undone", "loss")
    again.clear()
    again.look(2, 20, 29, 0.2, -1.0)
    assert again.find(2) is None


def test_unknown_numbers_stay_unknown() -> None:
    since = Aftermath.begin(decision(1, chosen=None, current=None), "", 0.0)
    numbers = (since.before_seconds, since.before_efficiency, since.predicted_seconds)
    assert all(map(math.isnan, numbers))

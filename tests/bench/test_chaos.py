"""The parts of ``bench.chaos``: what is drawn, what the line does to plans, what the logs tell."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench import results_file
from bench.chaos import job, run
from bench.chaos.line import Line, Mail
from bench.chaos.run import Findings, Logs, verdicts
from bench.chaos.schedule import KINDS, OPTIONS, Fault, draw
from gradpilot.protos import codec
from gradpilot.protos.messages import DENSE, Plan, Welcome
from gradpilot.worker_agent.plan import compile_option

RANKS = 3


def test_a_schedule_can_be_had_again_and_they_differ() -> None:
    drawn = [draw(7, number, RANKS, DENSE) for number in range(200)]
    assert drawn == [draw(7, number, RANKS, DENSE) for number in range(200)]
    assert len({(s.orders, s.faults) for s in drawn}) == 200
    assert drawn != [draw(8, number, RANKS, DENSE) for number in range(200)]


def test_schedules_hold_every_kind_of_fault_on_every_rank_and_kills() -> None:
    drawn = [draw(0, number, RANKS, DENSE) for number in range(200)]
    seen = {(fault.kind, fault.rank) for s in drawn for fault in s.faults}
    assert seen == set(itertools.product(KINDS, range(RANKS)))
    assert {o for s in drawn for _, o in s.orders} == set(OPTIONS)
    kills = [s for s in drawn if s.kill_before >= 0]
    assert 30 < len(kills) < 70
    assert {s.kill_before == len(s.orders) for s in kills} == {True, False}
    for schedule in drawn:
        assert len({fault.rank for fault in schedule.faults}) <= 1, "one rank at a time"
        ordered = [DENSE, *(option for _, option in schedule.orders)]
        assert all(a != b for a, b in itertools.pairwise(ordered))


def test_options_can_be_used_and_all_differ() -> None:
    given = [compile_option(option, RANKS) for option in OPTIONS]
    assert [g.option for g in given] == list(OPTIONS)
    assert len({g.option.label for g in given}) == len(OPTIONS)
    assert {g.feedback for g in given} == {True, False}, "residuals come and go"


def plan(number: int) -> Any:
    return codec.encode_controller(Plan(1, number, "layout"))


@pytest.mark.parametrize(
    ("kind", "arrive"),
    [("delay", [2, 1]), ("drop", [2]), ("duplicate", [1, 2, 1]), ("reorder", [2, 1])],
)
def test_what_the_line_does_to_the_first_of_two_plans(kind: str, arrive: list[int]) -> None:
    line, mail = Line("127.0.0.1:1"), Mail()
    line.begin([Fault(kind, 0, 0, 0.05)])
    line._deliver(0, codec.encode_controller(Welcome("c", 1, 2.0, 60.0)), mail)
    line._deliver(0, plan(1), mail)
    line._deliver(0, plan(2), mail)
    came = [codec.decode_controller(m) for m in itertools.islice(mail, 1 + len(arrive))]
    assert isinstance(came[0], Welcome), "only plans are disturbed"
    assert [m.id for m in came[1:] if isinstance(m, Plan)] == arrive
    assert line.done == {kind: 1}
    mail.end()
    assert list(mail) == []


def test_other_ranks_and_later_plans_are_left_alone() -> None:
    line, mail = Line("127.0.0.1:1"), Mail()
    line.begin([Fault("drop", 1, 1, 0.0)])
    for rank, number in ((0, 1), (0, 2), (1, 3), (1, 4), (1, 5)):
        line._deliver(rank, plan(number), mail)
    came = [codec.decode_controller(m) for m in itertools.islice(mail, 4)]
    assert [m.id for m in came if isinstance(m, Plan)] == [1, 2, 3, 5]


def test_a_plan_that_nothing_overtakes_comes_when_it_is_released() -> None:
    line, mail = Line("127.0.0.1:1"), Mail()
    line._mails[0] = mail
    line.begin([Fault("reorder", 0, 0, 0.0)])
    line._deliver(0, plan(1), mail)
    assert mail._messages == []
    line.release()
    assert codec.decode_controller(next(iter(mail))) == Plan(1, 1, "layout")


def write(folder: Path, rank: int, steps: list[tuple[int, int, int]]) -> None:
    """Append steps to a rank's log, as plan id, content and parameters."""
    done = (
        len(job.entries(path.read_bytes())) if (path := job.log_path(folder, rank)).exists() else 0
    )
    with path.open("ab") as file:
        for number, (key, content, parameters) in enumerate(steps, done):
            file.write(job._ENTRY.pack(number, 1, key, content, 9, parameters))


def test_logs_find_mixed_and_diverged_steps(tmp_path: Path) -> None:
    logs, found = Logs(tmp_path, RANKS), Findings()
    logs.compare(found)
    same = [(1, 5, 100 + n) for n in range(4)]
    for rank in range(RANKS):
        write(tmp_path, rank, same)
    logs.compare(found)
    assert (found.steps, found.mixed, found.diverged) == (4, [], [])
    write(tmp_path, 0, [(2, 5, 7), (2, 5, 7), (2, 5, 7), (2, 5, 7)])
    write(tmp_path, 1, [(1, 5, 7), (2, 6, 7), (2, 5, 8)])
    logs.compare(found)
    assert found.steps == 4, "not all ranks have noted these"
    write(tmp_path, 2, [(2, 5, 7), (2, 5, 7), (2, 5, 7)])
    logs.compare(found)
    assert (found.steps, found.mixed, found.diverged) == (7, [4, 5], [6])
    assert logs.last[0] is not None
    assert logs.last[0].step == 7


def test_half_an_entry_is_read_when_it_is_whole(tmp_path: Path) -> None:
    logs, found = Logs(tmp_path, 1), Findings()
    write(tmp_path, 0, [(1, 1, 1), (1, 1, 1)])
    path = job.log_path(tmp_path, 0)
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    logs.compare(found)
    assert found.steps == 1
    path.write_bytes(data)
    logs.compare(found)
    assert found.steps == 2


def test_every_verdict_can_fail() -> None:
    good = Findings(schedules=3, ranks=[{"frozen": ""}])
    assert all(v["holds"] for v in verdicts(3, good))
    bad = Findings(2, hangs=["x"], mixed=[1], diverged=[1], ranks=[{"frozen": "why"}])
    assert not any(v["holds"] for v in verdicts(3, bad))


def test_a_failure_is_the_exit_code_and_no_quick_run_writes_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disturb(schedules: int, seed: int) -> Findings:
        return Findings(schedules, faults={"drop": 1}, mixed=[3] if seed else [])

    def never(*_: object) -> None:
        raise AssertionError("a quick run leaves the results as they are")

    monkeypatch.setattr(run, "disturb", disturb)
    monkeypatch.setattr(results_file, "write", never)
    assert run.main(["--quick", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["schedules"] == 10
    assert run.main(["--quick", "--seed", "1"]) == 1
    assert "DOES NOT HOLD: steps with different plans: 1" in capsys.readouterr().out

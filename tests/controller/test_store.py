from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from gradpilot.controller.errors import StoreError
from gradpilot.controller.store import RETIRED_KEPT, Store, StoredRun
from gradpilot.protos.explanations import Since
from gradpilot.protos.messages import BF16, Decision, LinkEstimate, Plan
from tests.controller.fakes import layout, plan

pytestmark = pytest.mark.asyncio(loop_scope="session")


def decision(id_: int, made: Plan | None = None, model: str = "m") -> Decision:
    return Decision(
        run="r",
        model=model,
        term=1,
        id=id_,
        step=10 * id_,
        created=1e9 + id_,
        policy="p",
        outcome="switch" if made else "keep",
        reason="because",
        link=LinkEstimate(1e-3, 1e-9),
        plan=made,
        inputs_json='{"a":[1.5]}',
    )


async def test_every_start_is_a_new_term(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "state.sqlite3")
    for term in (1, 2, 3):
        store = Store(path)
        assert await store.open() == term
        await store.close()
        await store.close()  # twice does no harm


async def test_a_second_controller_is_kept_out(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite3"
    link = tmp_path / "link.sqlite3"
    link.symlink_to(path)
    first = Store(str(path))
    await first.open()
    for other in (path, link):  # the same file by another name
        second = Store(str(other))
        with pytest.raises(StoreError, match=r"in use by another controller \(pid \d+\)"):
            await second.open()
    await first.close()
    third = Store(str(path))
    assert await third.open() == 2
    await third.close()


async def test_what_is_no_state_file_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "text.sqlite3"
    path.write_text("this is no database " * 100)
    with pytest.raises(StoreError, match=r"text.sqlite3.*not a database"):
        await Store(str(path)).open()
    path = tmp_path / "newer.sqlite3"
    store = Store(str(path))
    await store.open()
    await store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = 99 WHERE key = 'schema'")
    connection.close()
    with pytest.raises(StoreError, match="schema 99"):
        await Store(str(path)).open()


async def test_it_is_durable_and_in_wal_mode(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s.sqlite3"))
    await store.open()
    assert store._engine is not None
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
    await store.close()


async def test_runs_and_decisions_come_back(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sqlite3")
    made = plan(layout(), 2)
    retired = tuple(f"i{i}" for i in range(RETIRED_KEPT + 5))
    stored = StoredRun("r", "m", "now", retired, True, BF16, 4, 70, 5.0)
    store = Store(path)
    await store.open()
    await store.save_run(replace(stored, frozen=False))
    await store.save_run(stored)
    await store.save_decision(decision(2, made))
    await store.save_decision(decision(3))
    await store.close()

    store = Store(path)
    await store.open()
    memory = await store.load("r", "m")
    assert memory.run == replace(stored, retired=retired[-RETIRED_KEPT:])
    assert memory.decision == decision(3)
    assert memory.plan == made
    assert await store.decision("r", "m", 2) == decision(2, made)
    assert await store.decision("r", "m") == decision(3)
    assert await store.decision("r", "m", 9) is None
    assert await store.decision("r", "other") is None
    assert [r.run for r in await store.runs()] == ["r"]
    assert (await store.load("x", "m")).run is None
    await store.close()


async def test_old_decisions_are_forgotten_but_not_the_newest_plan() -> None:
    store = Store(decisions_kept=3)
    await store.open()
    made = plan(layout(), 1)
    await store.save_decision(decision(1, made))
    await store.save_decision(decision(1, model="other"))
    for i in range(2, 10):
        await store.save_decision(decision(i))
    kept = [i for i in range(12) if await store.decision("r", "m", i) is not None]
    assert kept == [1, 7, 8, 9]
    assert (await store.load("r", "m")).plan == made
    assert await store.decision("r", "other", 1) is not None
    await store.close()


async def test_what_became_of_plans_is_kept_with_their_decisions(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sqlite3")
    store = Store(path, decisions_kept=4)
    await store.open()
    first = Since(1, "dense", 0.5, measured=(0.3,), first_step=5, last_step=9)
    await store.save_decision(decision(1, plan(layout(), 1)), (first,))
    await store.save_decision(decision(2), (replace(first, last_step=19),))
    await store.save_decision(decision(3, plan(layout(), 3)), (Since(3),))
    await store.save_since("r", "other", (Since(4, first_step=1),))
    await store.close()
    store = Store(path, decisions_kept=4)
    await store.open()
    taken = replace(first, last_step=19)
    # A plan that the ranks have not taken yet is the answer only if it is asked for.
    wanted = {1: 1, 2: 1, 3: 3, 4: 1, 9: 1}
    for asked, id_ in wanted.items():
        found = await store.since("r", "m", asked)
        assert found is not None
        assert found.id == id_
    assert await store.since("r", "m", 2) == taken
    assert await store.since("r", "m", 0) is None
    memory = await store.load("r", "m")
    assert [one.id for one in memory.since] == [1, 3]
    for i in range(4, 10):
        await store.save_decision(decision(i))
    assert await store.since("r", "m", 2) is None  # gone with the decision
    assert (await store.load("r", "m")).since[-1].id == 3
    assert (await store.load("r", "other")).since[-1].id == 4
    await store.close()


async def test_the_term_can_be_raised_above_what_agents_hold(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sqlite3")
    store = Store(path)
    await store.open()
    assert await store.raise_term(7) == 8
    assert await store.raise_term(3) == 8
    await store.close()
    store = Store(path)
    assert await store.open() == 9
    await store.close()


async def test_failures_are_store_errors_and_show_until_it_works_again() -> None:
    store = Store()
    await store.open()
    await store.save_decision(decision(1))
    with pytest.raises(StoreError, match="UNIQUE"):
        await store.save_decision(decision(1))
    assert "UNIQUE" in store.failure
    await store.save_decision(decision(2))
    assert store.failure == ""
    await store.close()
    with pytest.raises(StoreError):
        await store.save_decision(decision(3))


async def test_one_unreadable_decision_does_not_lock_a_run_out() -> None:
    store = Store()
    await store.open()
    await store.save_decision(decision(1))
    assert store._engine is not None
    with store._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE decisions SET body = x'00'")
    assert (await store.load("r", "m")).decision is None
    await store.close()

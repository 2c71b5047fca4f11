from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gradpilot.controller.config import PolicyConfig
from gradpilot.controller.run import Run
from gradpilot.controller.server import Controller
from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.history import GainRecord, History
from gradpilot.protos.jsoncodec import from_json
from gradpilot.protos.messages import BF16, DENSE, Ack, Plan, ProbeRequest, Welcome
from tests.controller import fakes
from tests.controller.fakes import agents, layout, serving, until


async def the_run(controller: Controller) -> Run:
    run = await until(lambda: controller.runs.get("run", "model"))
    assert isinstance(run, Run)
    return run


@pytest.mark.asyncio(loop_scope="session")
async def test_a_window_of_all_ranks_leads_to_one_plan_for_all() -> None:
    async with serving() as controller, agents(controller) as ranks:
        for rank in ranks:
            await rank.report()
        plans = [await rank.wait(Plan) for rank in ranks]
        assert len(set(plans)) == 1
        assert plans[0].key == (1, 1)
        assert plans[0].layout == layout().digest
        assert [a.bucket for a in plans[0].assignments] == ["b0", "b1", "b2", "b3"]
        assert plans[0].options() == (BF16,)
        decision = await controller.store.decision("run", "model")
        assert decision is not None
        assert decision.outcome == "switch"
        inputs = from_json(Inputs, decision.inputs_json)
        assert inputs.step == 19
        assert fakes.to_bf16("", inputs).options == tuple(a.option for a in plans[0].assignments)


@pytest.mark.asyncio(loop_scope="session")
async def test_three_of_four_ranks_are_no_news_until_the_window_closes() -> None:
    async with serving(report_seconds=0.5) as controller, agents(controller) as ranks:
        for rank in ranks[:3]:
            await rank.report()
        run = await the_run(controller)
        await until(lambda: run.reports_taken == 3)
        await asyncio.sleep(0.2)
        assert run.decision is None
        # The fourth stays silent: the others do not wait for it forever.
        plan = await ranks[0].wait(Plan, 5.0)
        assert plan.id == 1


@pytest.mark.asyncio(loop_scope="session")
async def test_reports_under_an_older_plan_are_no_news() -> None:
    async with serving(fakes.alternate) as controller, agents(controller) as ranks:
        for rank in ranks:
            await rank.report()
        plan = await ranks[0].wait(Plan)
        for _ in range(3):  # still on the way to the plan
            for rank in ranks:
                await rank.report()
        run = await the_run(controller)
        await until(lambda: run.reports_taken == 16)
        await asyncio.sleep(0.2)
        assert run.plans.newest == plan
        for rank in ranks:
            await rank.report(plan)
        second = await ranks[0].wait(Plan, number=2)
        assert second.id == plan.id + 1
        assert second.options() == (DENSE,)


@pytest.mark.asyncio(loop_scope="session")
async def test_decisions_of_a_run_are_rate_limited() -> None:
    async with serving(min_decision_seconds=30.0) as controller, agents(controller) as ranks:
        for _ in range(3):
            for rank in ranks:
                await rank.report(rank.newest_plan())
            await ranks[0].wait(Plan)
        await asyncio.sleep(0.2)
        assert sum((await the_run(controller)).decisions.outcomes.values()) == 1


@pytest.mark.asyncio(loop_scope="session")
async def test_a_probe_goes_to_all_ranks() -> None:
    async with serving(fakes.probe) as controller, agents(controller) as ranks:
        for rank in ranks:
            await rank.report()
        probes = [await rank.wait(ProbeRequest) for rank in ranks]
        assert set(probes) == {ProbeRequest(1, 4096, 1 << 20)}
        assert ranks[0].newest_plan() is None


async def windows(ranks: list[fakes.FakeAgent], run: Run, **fields: Any) -> None:
    """One window of each rank, and the decision that follows."""
    before = sum(run.decisions.outcomes.values())
    for rank in ranks:
        await rank.report(**fields)
    await until(lambda: sum(run.decisions.outcomes.values()) > before)


def probes(rank: fakes.FakeAgent) -> list[int]:
    return [m.id for m in rank.received if isinstance(m, ProbeRequest)]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_probe_is_not_asked_again_before_its_samples_came() -> None:
    async with serving(fakes.probe, report_seconds=60.0) as controller, agents(controller) as ranks:
        run = await the_run(controller)
        for _ in range(4):
            await windows(ranks, run, samples=())
        assert run.decisions.outcomes == {"probe": 1, "keep": 3}
        assert run.probes.repeats == 3
        assert run.decision is not None
        assert "the probe of decision 1 is under way" in run.decision.reason
        newest = await controller.store.decision("run", "model")
        assert newest is not None
        assert from_json(Inputs, newest.inputs_json).probing == 1  # so that it can be decided again
        await windows(ranks, run)  # with the collectives of the probe
        await ranks[0].wait(ProbeRequest, number=2)
        assert probes(ranks[0]) == [1, 5]


@pytest.mark.asyncio(loop_scope="session")
async def test_an_answered_probe_is_decided_on_at_once() -> None:
    patient = {"report_seconds": 60.0, "min_decision_seconds": 60.0}
    async with serving(fakes.probe, **patient) as controller, agents(controller) as ranks:
        run = await the_run(controller)
        await windows(ranks, run, samples=())
        assert run.decisions.outcomes == {"probe": 1}
        await windows(ranks, run)  # with the collectives of the probe
        assert run.decisions.outcomes == {"probe": 2}, "fakes.probe never has enough"
        assert not run.probes.answered


@pytest.mark.asyncio(loop_scope="session")
async def test_a_lost_probe_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradpilot.controller.planner.patience", lambda *_: 0.3)
    async with serving(fakes.probe) as controller, agents(controller) as ranks:
        run = await the_run(controller)
        await windows(ranks, run, samples=())
        await windows(ranks, run, samples=())
        assert run.probes.repeats == 1
        await asyncio.sleep(0.3)
        await windows(ranks, run, samples=())
        await ranks[0].wait(ProbeRequest, number=2)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_rank_that_connects_again_is_asked_too() -> None:
    async with serving(fakes.probe, report_seconds=60.0) as controller, agents(controller) as ranks:
        run = await the_run(controller)
        await windows(ranks, run, samples=())
        await ranks[3].wait(ProbeRequest)
        await ranks[3].leave()
        await until(lambda: run.connected == 3)
        await ranks[3].connect(controller.grpc_port)
        await until(lambda: run.connected == 4)
        await windows(ranks, run, samples=())
        assert [
            await rank.wait(ProbeRequest, number=n) for rank, n in ((ranks[0], 2), (ranks[3], 2))
        ]
        assert run.probes.repeats == 0


@pytest.mark.asyncio(loop_scope="session")
async def test_what_a_policy_learned_comes_back_with_the_next_inputs() -> None:
    learned = History(gains=(GainRecord("topk", (), 0.01, 0.5, 9),))

    def learn(policy: str, inputs: Inputs) -> Outcome:
        return Outcome("keep", "learned", history=None if inputs.history.gains else learned)

    async with serving(learn) as controller, agents(controller) as ranks:
        run = await the_run(controller)
        for _ in range(3):
            await windows(ranks, run)
        solver = controller.solver
        assert isinstance(solver, fakes.InlineSolver)
        assert [i.history for i in solver.seen[:3]] == [History(), learned, learned]
        newest = await controller.store.decision("run", "model")
        assert newest is not None
        assert from_json(Inputs, newest.inputs_json).history == learned


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("decide", [fakes.fail, fakes.nonsense])
async def test_a_failing_policy_keeps_the_plan(decide: object) -> None:
    async with serving(decide) as controller, agents(controller) as ranks:  # type: ignore[arg-type]
        for rank in ranks:
            await rank.report()
        run = await the_run(controller)
        decision = await until(lambda: run.decision)
        assert decision.outcome == "error"
        assert decision.plan is None
        assert "planted failure" in decision.reason or "1 options for 4" in decision.reason
        assert run.decisions.outcomes["error"] == 1
        assert run.setbacks == 1
        assert [type(m) for m in ranks[0].received] == [Welcome]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_rejected_plan_is_given_up_and_slows_decisions_down() -> None:
    async with serving(min_decision_seconds=0.3) as controller, agents(controller) as ranks:
        for rank in ranks:
            await rank.report()
        plan = await ranks[0].wait(Plan)
        await ranks[1].say(Ack(plan.term, plan.id, "rejected", 20, "no memory"))
        run = await the_run(controller)
        await until(lambda: run.setbacks == 1)
        assert run.plans.newest is None
        for rank in ranks:
            await rank.report()
        second = await ranks[0].wait(Plan, number=2)
        assert second.id == plan.id + 1
        assert run.decided_at > 0


@pytest.mark.asyncio(loop_scope="session")
async def test_a_decision_is_dropped_if_the_layout_changes_meanwhile() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async with serving() as controller, agents(controller) as ranks:
        solver = controller.solver
        plain = solver.decide

        async def slow(policy: str, inputs: Inputs) -> object:
            started.set()
            await asyncio.wait_for(go_on.wait(), 5)
            return await plain(policy, inputs)

        solver.decide = slow  # type: ignore[assignment, method-assign]
        for rank in ranks:
            await rank.report()
        await asyncio.wait_for(started.wait(), 5)
        rebuilt = layout(2, name="rebuilt")
        run = await the_run(controller)
        for rank in ranks:
            rank.layout = rebuilt
            await rank.say(fakes.catalog(rebuilt))
        await until(lambda: run.layout == rebuilt)
        go_on.set()
        await asyncio.sleep(0.1)
        assert run.decision is None
        for rank in ranks:
            await rank.report()
        plan = await ranks[0].wait(Plan)
        assert plan.layout == rebuilt.digest
        assert plan.id == 1


@pytest.mark.asyncio(loop_scope="session")
async def test_the_adaptive_policy_finds_the_planted_link_and_a_fitting_plan() -> None:
    slow = fakes.Link(alpha=1e-3, beta=8e-8)  # 100 Mbit/s: dense takes 2 s, compute 0.1 s
    async with (
        Controller(
            fakes.config(
                policy="adaptive",
                min_decision_seconds=0.1,
                # Of normal noise the largest tenth of the elements holds 0.44.
                policy_settings=PolicyConfig(warm_floor=0.3),
            )
        ) as controller,
        agents(controller) as ranks,
    ):
        for _ in range(3):
            for rank in ranks:
                await rank.report(rank.newest_plan(), link=slow)
        plan = await ranks[0].wait(Plan, 30.0)
        run = await the_run(controller)
        link = await until(lambda: run.link)
        assert link.alpha_seconds == pytest.approx(slow.alpha, rel=0.2)
        assert link.beta_seconds_per_byte == pytest.approx(slow.beta, rel=0.1)
        assert plan.options()[0].compressor == "topk"
        decision = run.decision
        assert decision is not None
        assert decision.chosen is not None
        assert decision.front
        assert decision.chosen.step_seconds < 1.0


@pytest.mark.asyncio(loop_scope="session")
async def test_the_adaptive_policy_stays_dense_on_a_fast_link() -> None:
    fast = fakes.Link(alpha=5e-6, beta=8e-11)  # 100 Gbit/s
    async with (
        Controller(fakes.config(policy="adaptive", min_decision_seconds=0.1)) as controller,
        agents(controller) as ranks,
    ):
        for _ in range(3):
            for rank in ranks:
                await rank.report(rank.newest_plan(), link=fast)
        run = await the_run(controller)
        decision = await until(lambda: run.decision, 30.0)
        assert decision.outcome in ("switch", "keep")
        assert {o.compressor for o in decision.chosen.options} <= {"none", "bf16"}


@pytest.mark.asyncio(loop_scope="session")
async def test_it_ends_when_cancelled_at_the_very_moment_it_wakes() -> None:
    async with serving() as controller, agents(controller, 1) as ranks:
        run = await the_run(controller)
        assert ranks
        for _ in range(30):
            task = asyncio.create_task(controller.planner.serve())
            await asyncio.sleep(0.03)  # past the spacing, so that it waits for news
            controller.planner.look(run)
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=2.0)
            assert task.cancelled()

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from gradpilot.controller.views import summary
from gradpilot.protos import codec
from gradpilot.protos.explanations import Since
from gradpilot.protos.jsoncodec import from_json
from gradpilot.protos.messages import (
    BF16,
    DENSE,
    MAX_MESSAGE_BYTES,
    Ack,
    Decision,
    Done,
    Option,
    PinOrder,
    Plan,
    RunDetail,
    RunRef,
    Welcome,
)
from gradpilot.protos.v1 import controller_pb2
from gradpilot.protos.v1.controller_pb2_grpc import ControllerServiceStub
from tests.controller import fakes
from tests.controller.fakes import FakeAgent, agents, layout, operator, serving, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


# --- agents --------------------------------------------------------------------------------------


async def test_hello_is_answered_with_welcome() -> None:
    async with serving(report_seconds=3.0, plan_ttl_seconds=99.0) as controller:
        agent = await FakeAgent().connect(controller.grpc_port)
        welcome = await agent.wait(Welcome)
        assert welcome == Welcome(controller.id, 1, 3.0, 99.0)
        await agent.leave()
        await until(lambda: not len(controller.sessions))
        run = controller.runs.get("run", "model")
        assert run is not None
        assert run.state == "ended"


async def test_a_rank_that_connects_again_gets_the_newest_plan_after_its_catalog() -> None:
    async with serving() as controller, agents(controller) as ranks:
        for rank in ranks:
            await rank.report()
        plan = await ranks[0].wait(Plan)
        again = await FakeAgent().connect(controller.grpc_port)
        assert await again.wait(Plan) == plan
        assert [type(m) for m in again.received] == [Welcome, Plan]
        holder = await FakeAgent().connect(controller.grpc_port, plan=plan)
        await holder.report(plan)
        await asyncio.sleep(0.1)
        assert holder.newest_plan() is None  # it has it
        await again.leave()
        await holder.leave()


async def test_a_plan_for_another_layout_is_not_sent() -> None:
    async with serving() as controller, agents(controller) as ranks:
        for rank in ranks:
            await rank.report()
        await ranks[0].wait(Plan)
        await ranks[0].say(fakes.catalog(layout(2, name="rebuilt")))
        await ranks[1].say(fakes.catalog(layout(2, name="rebuilt")))
        again = await FakeAgent(layout=layout(2, name="rebuilt")).connect(controller.grpc_port)
        await again.wait(Welcome)
        await asyncio.sleep(0.1)
        assert again.newest_plan() is None
        await again.leave()


async def test_a_newer_session_of_a_rank_replaces_the_older() -> None:
    async with serving() as controller:
        first = await FakeAgent().connect(controller.grpc_port)
        await first.wait(Welcome)
        second = await FakeAgent().connect(controller.grpc_port)
        await second.wait(Welcome)
        code, text = await first.ended()
        assert code is grpc.StatusCode.ABORTED
        assert "rank 0 opened a newer session" in text
        assert len(controller.sessions) == 1
        await second.report()
        run = controller.runs.get("run", "model")
        assert run is not None
        await until(lambda: run.reports_taken == 1)
        assert run.connected == 1
        await first.leave()
        await second.leave()


async def test_another_protocol_version_is_refused_in_words() -> None:
    async with serving() as controller:
        agent = await FakeAgent().connect(
            controller.grpc_port, with_catalog=False, protocol_version=99
        )
        code, text = await agent.ended()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "version 1" in text
        assert "99" in text
        await agent.leave()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rank": 4}, "Hello.rank"),
        ({"run": ""}, "Hello.run"),
        ({"run": "two\nlines"}, "Hello.run"),
        ({"world_size": 0}, "Hello.world_size"),
    ],
)
async def test_impossible_hellos_are_invalid(fields: dict[str, object], text: str) -> None:
    async with serving() as controller:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{controller.grpc_port}") as channel:
            call = ControllerServiceStub(channel).Session()
            await call.write(codec.encode_agent(replace(fakes.hello(), **fields)))  # type: ignore[arg-type]
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert text in await call.details()
        assert len(controller.runs) == 0


async def test_a_session_begins_with_hello() -> None:
    async with (
        serving() as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.grpc_port}") as channel,
    ):
        call = ControllerServiceStub(channel).Session()
        await call.write(codec.encode_agent(Ack(1, 1, "held", 0)))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await call.details() == "expected Hello first, got Ack"


async def test_ranks_of_an_earlier_start_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as controller, agents(controller) as old:
        await old[0].wait(Welcome)
        new = await FakeAgent(1).connect(controller.grpc_port, incarnation="second")
        await new.wait(Welcome)
        code, text = await old[0].ended()
        assert code is grpc.StatusCode.ABORTED
        assert "second" in text
        late = await FakeAgent(2).connect(
            controller.grpc_port, with_catalog=False, incarnation="first"
        )
        code, text = await late.ended()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "'first'" in text
        assert "'second'" in text
        assert not [r for r in caplog.records if r.levelname == "ERROR"]
        await new.leave()
        await late.leave()


async def test_a_catalog_with_another_layout_is_refused_naming_both() -> None:
    async with serving() as controller, agents(controller) as ranks:
        odd = layout(3, name="odd")
        newcomer = FakeAgent(0, 2, odd)
        other = FakeAgent(1, 2, layout())
        await newcomer.connect(controller.grpc_port, run="pair")
        await newcomer.wait(Welcome)
        await other.connect(controller.grpc_port, run="pair")
        code, text = await other.ended()
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert odd.digest in text
        assert layout().digest in text
        run = controller.runs.get("pair", "model")
        assert run is not None
        assert run.refused["catalog"] == 1
        await newcomer.leave()
        await other.leave()
        assert ranks[0].call.done() is False


async def test_bad_reports_are_counted_and_the_stream_stays_open() -> None:
    async with serving() as controller, agents(controller) as ranks:
        run = await until(lambda: controller.runs.get("run", "model"))
        await ranks[0].report(step_seconds=math.nan)
        await ranks[0].report(step_seconds=-1.0)
        await ranks[0].report(layout="ffff")
        await ranks[0].report(sequence=5)
        await ranks[0].report(sequence=5)
        await ranks[0].say(Ack(1, 1, "eaten", 0))
        await until(lambda: sum(run.refused.values()) == 5)
        assert run.refused == {"invalid": 3, "layout": 1, "sequence": 1}
        assert run.reports_taken == 1
        await ranks[0].report(sequence=6)
        await until(lambda: run.reports_taken == 2)
        assert not ranks[0].call.done()


async def test_messages_of_a_newer_agent_are_skipped() -> None:
    async with serving() as controller:
        agent = await FakeAgent().connect(controller.grpc_port)
        await agent.call.write(controller_pb2.AgentMessage())  # looks like an unknown kind
        await agent.report()
        run = await until(lambda: controller.runs.get("run", "model"))
        await until(lambda: run.reports_taken == 1)
        await agent.leave()


@pytest.mark.parametrize("size", [MAX_MESSAGE_BYTES + 1, 3 * MAX_MESSAGE_BYTES])
async def test_an_oversized_message_ends_the_stream_and_the_agent_may_come_back(size: int) -> None:
    async with serving() as controller:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{controller.grpc_port}", options=options
        ) as channel:
            call = ControllerServiceStub(channel).Session()
            await call.write(codec.encode_agent(fakes.hello()))
            await call.read()
            envelope = controller_pb2.AgentMessage()
            envelope.ack.reason = "x" * size
            await call.write(envelope)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        run = controller.runs.get("run", "model")
        assert run is not None
        assert run.refused["too_large"] == (1 if size < 2 * MAX_MESSAGE_BYTES else 0)
        again = await FakeAgent().connect(controller.grpc_port)
        await again.wait(Welcome)
        await again.leave()


async def test_a_stuck_agent_holds_up_nobody() -> None:
    async with serving(fakes.alternate) as controller, agents(controller) as ranks:
        stuck = await FakeAgent(0, 1).connect(controller.grpc_port, run="stuck")
        run = await until(lambda: controller.runs.get("stuck", "model"))
        assert stuck.reader is not None
        stuck.reader.cancel()  # nobody reads this stream any more
        big = Plan(1, 1, layout().digest, reason="x" * (MAX_MESSAGE_BYTES // 2))
        for number in range(50):
            controller.sessions.send(run, replace(big, id=number))
            await asyncio.sleep(0)
        for rank in ranks:
            await rank.report()
        await ranks[3].wait(Plan, 5.0)
        await stuck.leave()


async def test_too_many_runs_are_refused() -> None:
    async with serving(max_runs=1) as controller:
        first = await FakeAgent().connect(controller.grpc_port, run="one")
        await first.wait(Welcome)
        second = await FakeAgent().connect(controller.grpc_port, with_catalog=False, run="two")
        code, text = await second.ended()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_runs" in text
        await first.leave()
        await second.leave()


async def test_after_a_lost_store_term_and_numbers_go_on_above_what_agents_hold() -> None:
    held = fakes.plan(layout(), id_=41, term=7, option=DENSE)
    async with serving() as controller, agents(controller, plan=held) as ranks:
        welcome = await ranks[0].wait(Welcome)
        assert welcome.term == 8
        for rank in ranks:
            await rank.report(held)
        plan = await ranks[0].wait(Plan)
        assert plan.key == (8, 42)
        solver = controller.solver
        assert isinstance(solver, fakes.InlineSolver)
        assert solver.seen[0].current == held  # learned from the agents


# --- operators -----------------------------------------------------------------------------------


async def ask(call: object, ref: object) -> object:
    return codec.decode(await call(codec.encode(ref), timeout=5))  # type: ignore[operator]


async def test_list_get_and_explain() -> None:
    async with serving() as controller, agents(controller) as ranks, operator(controller) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as none_yet:
            await ask(stub.ExplainDecision, RunRef("run"))
        assert none_yet.value.code() is grpc.StatusCode.NOT_FOUND
        for rank in ranks:
            await rank.report()
        plan = await ranks[0].wait(Plan)
        for rank in ranks:
            await rank.report(plan)
        run = controller.runs.get("run", "model")
        assert run is not None
        await until(lambda: run.decision and run.decision.outcome == "keep")

        listed = codec.decode_runs(await stub.ListRuns(codec.list_runs_request(), timeout=5))
        assert [(s.run, s.model, s.state, s.ranks) for s in listed] == [
            ("run", "model", "running", 4)
        ]
        assert listed[0].plan_label == "bf16 native"
        assert listed[0].step == 29
        assert listed[0].step_seconds > 0.1

        detail = await ask(stub.GetRun, RunRef("run"))
        assert isinstance(detail, RunDetail)
        assert [m.rank for m in detail.members] == [0, 1, 2, 3]
        assert detail.layout == layout()
        assert detail.plan == plan
        assert detail.decision is not None

        newest = await ask(stub.ExplainDecision, RunRef("run", "model"))
        first = await ask(stub.ExplainDecision, RunRef("run", "model", 1))
        assert isinstance(newest, Decision)
        assert isinstance(first, Decision)
        assert (newest.id, newest.outcome, newest.plan) == (2, "keep", None)
        assert (first.id, first.outcome, first.plan) == (1, "switch", plan)
        assert first.inputs_json
        assert first.front
        since = from_json(Since, first.since_json)
        assert (since.id, since.end) == (1, "")
        assert since.before_seconds > since.measured_seconds > 0  # bf16 after fp32
        assert since.predicted_seconds == 0.2
        assert since.steps > 0
        assert newest.since_json == first.since_json  # of the plan in force


async def first_answer(call: object) -> object:
    return await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("method", "message", "code", "text"),
    [
        ("GetRun", RunRef("nobody"), grpc.StatusCode.NOT_FOUND, "known: 'run'"),
        ("GetRun", RunRef("run", "nope"), grpc.StatusCode.NOT_FOUND, "known: model, second"),
        ("GetRun", RunRef("run"), grpc.StatusCode.INVALID_ARGUMENT, "model, second"),
        ("GetRun", RunRef(""), grpc.StatusCode.INVALID_ARGUMENT, "RunRef.run"),
        ("ExplainDecision", RunRef("run", "model", 77), grpc.StatusCode.NOT_FOUND, "decision 77"),
        (
            "Pin",
            PinOrder("run", "model", Option("tpok")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "known",
        ),
        (
            "Pin",
            PinOrder("run", "model", Option("topk", 0.1, "native")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "allgather",
        ),
        (
            "Pin",
            PinOrder("run", "model", Option(collective="ring", skip=4)),
            grpc.StatusCode.INVALID_ARGUMENT,
            "skip",
        ),
        ("Watch", RunRef("nobody"), grpc.StatusCode.NOT_FOUND, "nobody"),
    ],
)
async def test_operators_are_told_what_is_wrong(
    method: str, message: object, code: grpc.StatusCode, text: str
) -> None:
    async with serving() as controller, agents(controller) as ranks, operator(controller) as stub:
        second = await FakeAgent().connect(controller.grpc_port, model="second")
        await second.wait(Welcome)
        await until(lambda: (r := controller.runs.get("run", "model")) and r.families)
        await ranks[0].wait(Welcome)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await first_answer(getattr(stub, method)(codec.encode(message), timeout=5))
        assert error.value.code() is code
        assert text in (error.value.details() or "")
        await second.leave()


async def test_pin_and_unpin() -> None:
    async with serving() as controller, agents(controller) as ranks, operator(controller) as stub:
        run = await until(
            lambda: (r := controller.runs.get("run", "model")) and r.connected == 4 and r
        )
        await until(lambda: run.layout)
        option = Option("topk", 0.02, "allgather")  # not on the ladder, but carried
        done = await ask(stub.Pin, PinOrder("run", "", option))
        assert done == Done("pinned topk 2% allgather; plan 1 sent to 4 ranks")
        plans = [await rank.wait(Plan) for rank in ranks]
        assert {p.options() for p in plans} == {(option,)}
        assert run.decision is not None
        assert run.decision.outcome == "pinned"
        assert summary(run).pinned == option.label
        for rank in ranks:
            await rank.report(plans[0])
        await until(lambda: run.reports_taken == 4)
        await asyncio.sleep(0.2)
        assert run.decisions.outcomes == {"pinned": 1}  # the policy is not asked

        await ask(stub.Unpin, RunRef("run"))
        plan = await ranks[0].wait(Plan, number=2)  # from the windows that it has
        assert plan.id == 2
        assert plan.options() == (BF16,)
        again = await ask(stub.Unpin, RunRef("run"))
        assert again == Done("nothing was pinned")


async def test_a_pin_follows_the_layout() -> None:
    async with serving() as controller, agents(controller) as ranks, operator(controller) as stub:
        run = await until(
            lambda: (r := controller.runs.get("run", "model")) and r.connected == 4 and r
        )
        await until(lambda: sum(m.layout != "" for m in run.members.values()) == 4)
        await ask(stub.Pin, PinOrder("run", "model", BF16))
        await ranks[0].wait(Plan)
        rebuilt = layout(2, name="rebuilt")
        for rank in ranks:
            await rank.say(fakes.catalog(rebuilt))
        for rank in ranks:
            plan = await rank.wait(Plan, number=2)
            assert plan.layout == rebuilt.digest
            assert plan.options() == (BF16,)


async def test_freeze_and_resume() -> None:
    async with serving() as controller, agents(controller) as ranks, operator(controller) as stub:
        run = await until(lambda: controller.runs.get("run", "model"))
        await ask(stub.Freeze, RunRef("run"))
        assert run.frozen
        for rank in ranks:
            await rank.report()
        await until(lambda: run.reports_taken == 4)
        await asyncio.sleep(0.2)
        assert run.decision is None
        assert summary(run).frozen
        await ask(stub.Resume, RunRef("run"))
        assert (await ranks[0].wait(Plan)).options() == (BF16,)


async def test_watch_shows_decisions_as_they_are_taken() -> None:
    async with serving() as controller, agents(controller) as ranks, operator(controller) as stub:
        await until(lambda: controller.runs.get("run", "model"))
        call = stub.Watch(codec.encode(RunRef("run")))
        await asyncio.wait_for(call.wait_for_connection(), 5)
        for rank in ranks:
            await rank.report()
        decision = codec.decode(await asyncio.wait_for(call.read(), 5))
        assert (decision.id, decision.outcome) == (1, "switch")
        assert decision.inputs_json == ""
        call.cancel()
        await until(lambda: not controller.sessions._watchers)


async def test_orders_survive_a_restart(tmp_path: Path) -> None:
    state = str(tmp_path / "state.sqlite3")
    async with (
        serving(state=state) as controller,
        agents(controller) as ranks,
        operator(controller) as stub,
    ):
        await until(lambda: (r := controller.runs.get("run", "model")) and r.layout)
        await ask(stub.Pin, PinOrder("run", "model", BF16))
        await ask(stub.Freeze, RunRef("run"))
        plan = await ranks[0].wait(Plan)
    async with serving(state=state) as controller, operator(controller) as stub:
        listed = codec.decode_runs(await stub.ListRuns(codec.list_runs_request(), timeout=5))
        assert [(s.state, s.frozen, s.pinned) for s in listed] == [("ended", True, "bf16 native")]
        explained = await ask(stub.ExplainDecision, RunRef("run"))
        assert isinstance(explained, Decision)
        assert explained.plan == plan
        async with agents(controller) as ranks:
            assert await ranks[0].wait(Plan) == plan  # reloaded, not numbered anew
            assert (await ranks[0].wait(Welcome)).term == 2


async def test_explain_fits_one_message_whatever_it_holds() -> None:
    async with serving() as controller, agents(controller) as ranks, operator(controller) as stub:
        for rank in ranks:
            await rank.report()
        run = await until(lambda: controller.runs.get("run", "model"))
        decision = await until(lambda: run.decision)
        huge = replace(decision, id=99, inputs_json="x" * (MAX_MESSAGE_BYTES + 1))
        await controller.store.save_decision(huge)
        explained = await ask(stub.ExplainDecision, RunRef("run"))
        assert isinstance(explained, Decision)
        assert explained.inputs_json == ""
        assert explained.front

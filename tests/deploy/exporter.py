"""A real controller with scripted agents, so that every metric has values: a program of its own.

Three runs: "good" is healthy, "bad" has everything wrong that a number can show, and "still" makes
no steps, lacks a rank and is frozen. ``python tests/deploy/exporter.py`` prints the HTTP port and
runs until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import ClassVar

import grpc.aio

from gradpilot.controller.config import load
from gradpilot.controller.server import Controller
from gradpilot.policies.base import POLICIES, Inputs, Outcome
from gradpilot.policies.history import History, StepError
from gradpilot.protos import codec
from gradpilot.protos.messages import (
    Ack,
    Bucket,
    BucketReport,
    Candidate,
    Catalog,
    Counters,
    Hello,
    Layout,
    LinkEstimate,
    Option,
    Plan,
    Report,
)
from gradpilot.protos.v1 import controller_pb2_grpc, operator_pb2, operator_pb2_grpc

REPORT_SECONDS = 0.5
RANKS = 2
LAYOUT = Layout.of((Bucket("a", 0, 1000), Bucket("b", 1, 3000)))
OPTIONS = (Option("topk", 0.01, "allgather"), Option("randomk", 0.1, "ring", skip=1))
ARGUMENTS = [
    "--grpc-address=127.0.0.1:0",
    "--http-address=127.0.0.1:0",
    "--state=:memory:",
    "--min-decision-seconds=0",
    "--policy=scripted",
    "--log-level=error",
]


@dataclass(frozen=True)
class Script:
    """What the ranks of a run report.

    Attributes:
        run: Run id.
        steps: Steps in each report.
        step_seconds: Step time.
        straggle_seconds: How much longer the slower rank's collectives take, for each bucket.
        nonfinite: Non-finite steps in each report.
        events: Everything else that goes wrong, in each report.
        emulated: Whether the link is emulated.
        world_size: Ranks of the job, of which ``RANKS`` are connected.
    """

    run: str
    steps: int
    step_seconds: float = 0.5
    straggle_seconds: float = 0.01
    nonfinite: int = 0
    events: int = 0
    emulated: bool = False
    world_size: int = RANKS


SCRIPTS = (
    Script("good", steps=5),
    Script("bad", 10, 1.0, 0.4, nonfinite=2, events=1, emulated=True),
    Script("still", steps=0, world_size=RANKS + 1),
)


@POLICIES.register("scripted")
class Scripted:
    """Decides by turns: switch, keep, and fail for the run "bad"."""

    source: ClassVar[str] = "a script"
    grain: ClassVar[str] = "uniform"
    uses: ClassVar[tuple[str, ...]] = ()

    def decide(self, inputs: Inputs) -> Outcome:
        """Return the outcome whose turn it is."""
        turn = (inputs.current.id if inputs.current is not None else 0) + inputs.step // 10
        if inputs.run == "bad" and turn % 2:
            raise ValueError("scripted")
        option = OPTIONS[turn % len(OPTIONS)]
        candidate = Candidate((option,), 0.1, 0.01, 0.1, 0.9, 0.95, 0.5, 0.02)
        return Outcome(
            outcome="keep" if inputs.current is not None and turn % 3 else "switch",
            reason="scripted",
            options=(option,) * len(inputs.layout.buckets),
            chosen=candidate,
            current=candidate,
            front=(candidate,) * 3,
            link=LinkEstimate(1e-3, 8e-9, samples=10, age_seconds=1.0),
            history=History(errors=(StepError("topk", "topk", 1.1, False, inputs.step),)),
        )


def report(script: Script, rank: int, number: int, plan: Plan, switches: int) -> Report:
    """Return one rank's report number 0, 1, ..."""
    last = 1000 + number * script.steps
    buckets = tuple(
        BucketReport(
            bucket=bucket.index,
            ready_seconds=0.01 * bucket.index,
            compress_seconds=0.002,
            decompress_seconds=0.001,
            wire_seconds=0.05 + rank * script.straggle_seconds,
            wire_bytes=80,
            gain=0.8,
            gradient_sq=1.0,
            residual_sq=0.2,
        )
        for bucket in LAYOUT.buckets
    )
    return Report(
        layout=LAYOUT.digest,
        sequence=number,
        first_step=last,
        last_step=last,
        plan_term=plan.term,
        plan_id=plan.id,
        step_seconds=script.step_seconds,
        compute_seconds=0.3,
        exposed_seconds=0.2,
        buckets=buckets,
        counters=Counters(
            steps=last,
            switches=switches,
            nonfinite_steps=number * script.nonfinite,
            residual_resets=number * script.events,
            reports_dropped=number * script.events,
            plans_rejected=number * script.events,
            agreement_failures=number * script.events,
            wire_bytes=number * script.steps * 160,
            dense_bytes=number * script.steps * 4 * LAYOUT.elements,
        ),
        loss=2.0 / (1 + number),
        lr=0.1,
    )


async def rank(
    stub: controller_pb2_grpc.ControllerServiceAsyncStub, script: Script, index: int
) -> None:
    """Be one rank until cancelled; put every plan in force at once."""
    stream = stub.Session()
    hello = Hello(script.run, "model", "1", index, script.world_size, emulated=script.emulated)
    await stream.write(codec.encode_agent(hello))
    await stream.write(codec.encode_agent(Catalog(LAYOUT, ())))
    held = [Plan(0, 0, LAYOUT.digest)]

    async def listen() -> None:
        async for envelope in stream:
            message = codec.decode_controller(envelope)
            if isinstance(message, Plan):
                held.append(message)
                ack = Ack(message.term, message.id, "agreed", 1000)
                await stream.write(codec.encode_agent(ack))

    async with asyncio.TaskGroup() as group:
        group.create_task(listen())
        for number in range(1_000_000):
            message = report(script, index, number, held[-1], len(held) - 1)
            await stream.write(codec.encode_agent(message))
            if script.events:  # the same once more is refused
                await stream.write(codec.encode_agent(message))
            await asyncio.sleep(REPORT_SECONDS)


async def stranger(stub: controller_pb2_grpc.ControllerServiceAsyncStub) -> None:
    """Be an agent of another version that is refused again and again."""
    while True:
        stream = stub.Session()
        hello = Hello("old", "model", "1", 0, 1, protocol_version=0)
        await stream.write(codec.encode_agent(hello))
        await stream.code()
        await asyncio.sleep(REPORT_SECONDS)


async def main() -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    async with (
        Controller(load(ARGUMENTS, {})) as controller,
        grpc.aio.insecure_channel(f"127.0.0.1:{controller.grpc_port}") as channel,
        asyncio.TaskGroup() as group,
    ):
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        tasks = [group.create_task(stranger(stub))]
        for script in SCRIPTS:
            tasks += [group.create_task(rank(stub, script, index)) for index in range(RANKS)]
        await asyncio.sleep(2 * REPORT_SECONDS)
        operators = operator_pb2_grpc.OperatorServiceStub(channel)
        await operators.Freeze(operator_pb2.RunRef(run="still"))
        sys.stdout.write(f"{controller.http_port}\n")
        sys.stdout.flush()
        await loop.run_in_executor(None, sys.stdin.read)
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main())

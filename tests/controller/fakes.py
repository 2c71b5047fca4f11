"""Fake agents, a planted link and tiny policies for the controller's tests.

All tests that speak grpc.aio share one event loop (``loop_scope="session"``): its completion queue
is one for the process, and events of a closed loop would be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc.aio

from gradpilot.controller.config import ControllerConfig
from gradpilot.controller.server import Controller
from gradpilot.controller.solver import Decide, Solver, SolverError
from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.cost import coefficients
from gradpilot.policies.gain import gaussian_gain
from gradpilot.protos import codec
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import (
    BF16,
    DENSE,
    ENERGY_RATIOS,
    AgentMessage,
    Bucket,
    BucketReport,
    BucketRounds,
    Candidate,
    Catalog,
    ComputeSample,
    ControllerMessage,
    Counters,
    Family,
    Hello,
    LadderPoint,
    Layout,
    LinkEstimate,
    Option,
    Plan,
    Report,
    WireRound,
    WireSample,
)
from gradpilot.protos.transport import CLIENT_OPTIONS
from gradpilot.protos.v1.controller_pb2_grpc import ControllerServiceStub
from gradpilot.protos.v1.operator_pb2_grpc import OperatorServiceStub

T = TypeVar("T")

RATIOS = (0.001, 0.01, 0.1)


def layout(buckets: int = 4, elements: int = 1 << 20, name: str = "b") -> Layout:
    return Layout.of(tuple(Bucket(f"{name}{i}", i, elements) for i in range(buckets)))


def families(of: Layout) -> tuple[Family, ...]:
    def ladder(kind: str, size: Callable[[int, float], int], *ratios: float) -> Any:
        return tuple(
            LadderPoint(
                ratio,
                tuple(
                    BucketRounds((WireRound(kind, size(b.elements, ratio)),)) for b in of.buckets
                ),
            )
            for ratio in ratios
        )

    return (
        Family("none", (), ("native", "ring"), ladder("all_reduce", lambda n, _: 4 * n, 1.0)),
        Family("bf16", (), ("native", "ring"), ladder("all_reduce", lambda n, _: 2 * n, 1.0)),
        Family(
            "topk",
            (),
            ("allgather",),
            ladder("all_gather", lambda n, c: 8 * int(c * n), *RATIOS),
            gain_model="energy",
            efficiency_exponent=0.25,
        ),
    )


def catalog(of: Layout) -> Catalog:
    calibration = tuple(
        ComputeSample(name, (), ratio, elements, cost * elements, 0.5 * cost * elements)
        for name, ratios, cost in (
            ("none", (1.0,), 1e-12),
            ("bf16", (1.0,), 1e-10),
            ("topk", RATIOS, 4e-9),
        )
        for ratio in ratios
        for elements in {b.elements for b in of.buckets}
    )
    return Catalog(of, families(of), calibration)


@dataclass(frozen=True)
class Link:
    """The planted truth: latency, seconds per byte, seconds that later ranks wait less."""

    alpha: float = 2e-4
    beta: float = 8e-9  # 1 Gbit/s
    straggle: float = 5e-3

    def seconds(self, collective: str, size: int, world_size: int, rank: int) -> float:
        alphas, payloads = coefficients(collective, world_size)
        cost = alphas * self.alpha + payloads * size * self.beta
        return cost + self.straggle * (world_size - 1 - rank) / world_size


def rounds_of(option: Option, elements: int) -> tuple[str, int]:
    if option.compressor == "topk":
        return "all_gather", 8 * int(option.ratio * elements)
    return "all_reduce", (2 if option.compressor == "bf16" else 4) * elements


def report(
    of: Layout,
    rank: int = 0,
    sequence: int = 1,
    plan: Plan | None = None,
    world_size: int = 4,
    link: Link | None = None,
    steps: int = 10,
    **fields: Any,
) -> Report:
    """What a rank would report of steps ``sequence * steps ..`` under a plan over the link."""
    link = link or Link()
    first = sequence * steps
    samples, buckets = [], []
    for b in of.buckets:
        option = plan.option(b.fingerprint) if plan is not None else DENSE
        kind, size = rounds_of(option, b.elements)
        seconds = link.seconds(kind, size, world_size, rank)
        samples += [WireSample(first + s, b.index, 0, kind, size, 0, seconds) for s in range(3)]
        buckets.append(
            BucketReport(
                bucket=b.index,
                ready_seconds=0.01 * b.index,
                compress_seconds=2e-3 if option.compressor == "topk" else 1e-6,
                decompress_seconds=1e-3 if option.compressor == "topk" else 1e-6,
                wire_seconds=seconds,
                wire_bytes=size,
                gain=gaussian_gain(option.ratio),
                gradient_sq=1.0,
                residual_sq=0.5,
                energy=tuple(gaussian_gain(r) for r in ENERGY_RATIOS),
            )
        )
    # A probe, so that latency and bandwidth can be told apart from the first window on.
    for number, size in enumerate((4096, 1 << 20)):
        seconds = link.seconds("all_reduce", size, world_size, world_size - 1)
        samples += [
            WireSample(first + s, -1, number, "all_reduce", size, 0, seconds) for s in range(3)
        ]
    wire = sum(b.wire_seconds for b in buckets)
    exposed = max(wire - 0.03, 0.0)
    values: dict[str, Any] = {
        "layout": of.digest,
        "sequence": sequence,
        "first_step": first,
        "last_step": first + steps - 1,
        "plan_term": plan.term if plan is not None else 0,
        "plan_id": plan.id if plan is not None else 0,
        "step_seconds": 0.1 + exposed,
        "compute_seconds": 0.1,
        "exposed_seconds": exposed,
        "samples": tuple(samples),
        "buckets": tuple(buckets),
        "counters": Counters(
            steps=first + steps,
            wire_bytes=(first + steps) * sum(b.wire_bytes for b in buckets),
            dense_bytes=(first + steps) * 4 * of.elements,
        ),
    }
    return Report(**{**values, **fields})


def hello(rank: int = 0, world_size: int = 4, **fields: Any) -> Hello:
    values: dict[str, Any] = {"run": "run", "model": "model", "incarnation": "first"}
    return Hello(**{**values, "rank": rank, "world_size": world_size, "backend": "gloo", **fields})


def plan(of: Layout, id_: int = 1, term: int = 1, option: Option = BF16) -> Plan:
    return Plan(term=term, id=id_, layout=of.digest, default=option)


# --- policies ----------------------------------------------------------------------------------


def candidate(option: Option, step_seconds: float = 0.2) -> Candidate:
    return Candidate((option,), 0.0, 0.0, 0.1, 1.0, 1.0, step_seconds, 0.5)


def to_bf16(policy: str, inputs: Inputs) -> Outcome:
    """Switch to bf16, then keep."""
    link = LinkEstimate(1e-3, 1e-9, samples=len(inputs.operations))
    chosen = candidate(BF16)
    if inputs.current is not None and set(inputs.current.options()) == {BF16}:
        return Outcome("keep", "bf16 already", chosen=chosen, current=chosen, link=link)
    options = (BF16,) * len(inputs.layout.buckets)
    return Outcome("switch", "bf16 is cheap", options, chosen, front=(chosen,), link=link)


def alternate(policy: str, inputs: Inputs) -> Outcome:
    """Switch every time, between bf16 and fp32."""
    now = set(inputs.current.options()) if inputs.current is not None else {DENSE}
    option = DENSE if now == {BF16} else BF16
    return Outcome("switch", "the other", (option,) * len(inputs.layout.buckets))


def probe(policy: str, inputs: Inputs) -> Outcome:
    return Outcome("probe", "cannot tell", probe_bytes=(4096, 1 << 20))


def fail(policy: str, inputs: Inputs) -> Outcome:
    raise ValueError("planted failure")


def hang(policy: str, inputs: Inputs) -> Outcome:
    time.sleep(60)
    return Outcome("keep", "never")


def die(policy: str, inputs: Inputs) -> Outcome:
    os._exit(3)


def nonsense(policy: str, inputs: Inputs) -> Outcome:
    return Outcome("switch", "one option too few", options=(BF16,))


class InlineSolver(Solver):
    """Calls the policy right here, so that tests need not start a process."""

    def __init__(self, decide: Decide) -> None:
        super().__init__(1.0)
        self.call = decide
        self.seen: list[Inputs] = []

    async def start(self) -> None:
        pass

    async def decide(self, policy: str, inputs: Inputs) -> tuple[Outcome, str]:
        await asyncio.sleep(0)
        self.seen.append(inputs)
        try:
            return from_json(Outcome, to_json(self.call(policy, inputs))), to_json(inputs)
        except ValueError as error:
            raise SolverError(str(error)) from error


# --- controller and agents ---------------------------------------------------------------------


def config(**fields: Any) -> ControllerConfig:
    values: dict[str, Any] = {
        "grpc_address": "127.0.0.1:0",
        "http_address": "127.0.0.1:0",
        "state": ":memory:",
        "report_seconds": 0.2,
        "min_decision_seconds": 0.0,
        "policy": "fixed",
        "drain_seconds": 0.5,
    }
    return ControllerConfig(**{**values, **fields})


@contextlib.asynccontextmanager
async def serving(decide: Decide = to_bf16, **fields: Any) -> AsyncIterator[Controller]:
    async with Controller(config(**fields), InlineSolver(decide)) as controller:
        yield controller


@dataclass
class FakeAgent:
    """One rank over a real channel."""

    rank: int = 0
    world_size: int = 4
    layout: Layout = field(default_factory=layout)
    hello: Hello = field(default_factory=hello)
    received: list[ControllerMessage] = field(default_factory=list)
    sequence: int = 0
    call: Any = None
    channel: Any = None
    reader: asyncio.Task[None] | None = None

    async def connect(self, port: int, *, with_catalog: bool = True, **fields: Any) -> FakeAgent:
        self.hello = hello(self.rank, self.world_size, **fields)
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS)
        self.call = ControllerServiceStub(self.channel).Session()
        self.reader = asyncio.create_task(self._read())
        await self.say(self.hello)
        if with_catalog:
            await self.say(catalog(self.layout))
        return self

    async def say(self, message: AgentMessage) -> None:
        await asyncio.wait_for(self.call.write(codec.encode_agent(message)), 5)

    async def report(self, under: Plan | None = None, **fields: Any) -> None:
        self.sequence += 1
        values = {"rank": self.rank, "sequence": self.sequence, "plan": under, **fields}
        await self.say(report(self.layout, world_size=self.world_size, **values))

    async def wait(self, kind: type[T], seconds: float = 10.0, number: int = 1) -> T:
        """Return the ``number``-th message of a kind, waiting for it."""
        async with asyncio.timeout(seconds):
            while len(found := [m for m in self.received if isinstance(m, kind)]) < number:
                await asyncio.sleep(0.01)
        return found[number - 1]

    async def ended(self, seconds: float = 10.0) -> tuple[grpc.StatusCode, str]:
        """Return the status that the stream ends with."""
        async with asyncio.timeout(seconds):
            return await self.call.code(), await self.call.details()

    def newest_plan(self) -> Plan | None:
        plans = [m for m in self.received if isinstance(m, Plan)]
        return plans[-1] if plans else None

    async def leave(self) -> None:
        if self.call is not None:
            self.call.cancel()
            await self.channel.close()
        if self.reader is not None:
            await asyncio.wait([self.reader])

    async def _read(self) -> None:
        try:
            while (envelope := await self.call.read()) is not grpc.aio.EOF:
                message = codec.decode_controller(envelope)
                if message is not None:
                    self.received.append(message)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass


@contextlib.asynccontextmanager
async def agents(
    controller: Controller | int, world_size: int = 4, **fields: Any
) -> AsyncIterator[list[FakeAgent]]:
    """All ranks of a run, connected and with their catalogs sent."""
    port = controller if isinstance(controller, int) else controller.grpc_port
    of = fields.pop("layout", None) or layout()
    members = [FakeAgent(rank, world_size, of) for rank in range(world_size)]
    try:
        for member in members:
            await member.connect(port, **fields)
        yield members
    finally:
        for member in members:
            await member.leave()


@contextlib.asynccontextmanager
async def operator(controller: Controller | int) -> AsyncIterator[Any]:
    port = controller if isinstance(controller, int) else controller.grpc_port
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
        yield OperatorServiceStub(channel)


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Return the condition's value once it is true."""
    async with asyncio.timeout(seconds):
        while not (value := condition()):
            await asyncio.sleep(0.01)
    return value


def with_gain(window: Report, gain: float) -> Report:
    return replace(window, buckets=tuple(replace(b, gain=gain) for b in window.buckets))

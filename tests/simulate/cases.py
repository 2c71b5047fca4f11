"""Small cases for the tests of the simulator."""

from __future__ import annotations

from typing import Any

from gradpilot.policies.base import Inputs, Outcome
from gradpilot.protos.messages import BF16, DENSE, Option
from gradpilot.simulate.driver import Case
from gradpilot.simulate.engine import QUIET
from gradpilot.simulate.jobs import make_job
from gradpilot.simulate.traces import Trace, constant
from gradpilot.simulate.world import World

TOPK = Option("topk", 0.03, "allgather")


def case(
    trace: Trace | None = None,
    *,
    model: str = "resnet50",
    ranks: int = 8,
    steps: int = 300,
    sequential: bool = False,
    **fields: Any,
) -> Case:
    world = World(make_job(model), ranks, sequential=sequential)
    values: dict[str, Any] = {"noise": QUIET, **fields}
    return Case(world, trace or constant(1.0, 1.0), steps, **values)


def everywhere(of: Case, option: Option) -> tuple[Option, ...]:
    return (option,) * len(of.world.job.layout.buckets)


def alternate(inputs: Inputs) -> Outcome:
    """Switch at every decision, between bf16 and fp32."""
    now = inputs.current.options()[0] if inputs.current is not None else DENSE
    option = DENSE if now == BF16 else BF16
    return Outcome("switch", "the other", (option,) * len(inputs.layout.buckets))

from __future__ import annotations

import itertools

import pytest

from gradpilot.errors import ConfigError
from gradpilot.policies.base import Inputs, Outcome, PolicySettings
from gradpilot.policies.link import fit_link
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import BF16, DENSE, EARLY_INTERVAL, Option, Plan
from gradpilot.simulate.driver import Driver, Timing
from gradpilot.simulate.engine import Noise
from gradpilot.simulate.traces import Link, Trace, make_trace
from tests.simulate.cases import TOPK, alternate, case, everywhere


def test_a_fixed_plan_takes_as_long_as_its_steps() -> None:
    of = case(steps=250)
    seconds = of.world.seconds(of.world.costs((DENSE, BF16)), of.trace.at(0))
    for option, each in zip((DENSE, BF16), seconds, strict=True):
        result = Driver(of).fixed(everywhere(of, option))
        assert result.steps == 250
        assert result.seconds == pytest.approx(250 * each, rel=1e-9)
        assert result.below_floor == 0


def test_less_gain_takes_more_steps() -> None:
    of = case(steps=250)
    result = Driver(of).fixed(everywhere(of, TOPK))
    worths = []
    for at in (0.0, 0.5, 1.0):
        _, worth = of.world.worth((TOPK,), at)
        worths.append(float(worth[0] @ of.world.job.gradients.weights(at)))
    assert 250 / max(worths) <= result.steps <= 250 / min(worths) + 1


def test_the_link_changes_when_the_trace_says() -> None:
    fast, slow = Link.of(0.1, 25), Link.of(0.1, 0.5)
    of = case(Trace("two", (0.0, 20.0), (fast, slow)), steps=400)
    quick, late = (of.world.seconds(of.world.costs((DENSE,)), k)[0] for k in (fast, slow))
    before = -(-20.0 // quick)  # a step that began before the change keeps its link
    expected = before * quick + (400 - before) * late
    assert Driver(of).fixed(everywhere(of, DENSE)).seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
def test_equal_cases_have_equal_results(policy: str) -> None:
    of = case(make_trace("steps", 1, 200.0), noise=Noise(), steps=400)
    assert Driver(of).run(policy) == Driver(of).run(policy)


def test_plans_change_at_decision_steps_only() -> None:
    of = case(noise=Noise(), steps=400, settings=PolicySettings(interval=20, interval_seconds=1e9))
    result = Driver(of).run(alternate)
    assert len(result.switches) > 5
    assert result.switches[0].step % EARLY_INTERVAL == 0
    assert all(switch.step % 20 == 0 for switch in result.switches[1:])
    for switch in result.switches:
        assert switch.decided <= switch.seconds
    decided = [switch.decided for switch in result.switches]
    assert all(b - a >= Timing().decision_seconds for a, b in itertools.pairwise(decided))
    assert [s.options for s in result.switches[:3]] == [(BF16,), (DENSE,), (BF16,)]


def collected(policy_noise: Noise, ranks: int) -> list[Inputs]:
    found: list[Inputs] = []

    def note(inputs: Inputs) -> Outcome:
        found.append(inputs)
        option = TOPK if len(found) % 2 else DENSE
        options = (option,) * len(inputs.layout.buckets)
        return Outcome("switch", "to see everything", options)

    Driver(case(noise=policy_noise, ranks=ranks, sequential=True)).run(note)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8, 1024])
def test_inputs_are_those_of_a_controller(ranks: int) -> None:
    found = collected(Noise(), ranks)
    assert len(found) > 3
    steps = [inputs.step for inputs in found]
    assert steps == sorted(set(steps))
    for before, inputs in itertools.pairwise(found):
        assert inputs.world_size == ranks
        assert inputs.start == DENSE
        assert isinstance(inputs.current, Plan)
        assert len(inputs.buckets) == len(inputs.layout.buckets)
        assert all(len(b.energy) == 13 and b.gradient_sq > 0 for b in inputs.buckets)
        assert inputs.steps_since_switch <= inputs.step - before.step + 50
        assert all(o.age_seconds >= 0 and o.straggle_seconds >= 0 for o in inputs.operations)
        assert from_json(Inputs, to_json(inputs)) == inputs
    kinds = {(o.collective, o.bytes) for o in found[-1].operations}
    assert {"all_reduce", "all_gather"} == {kind for kind, _ in kinds}
    assert found[-1].straggle_seconds > 0


def test_the_true_link_can_be_measured() -> None:
    inputs = collected(Noise(), 8)[-1]
    link = fit_link(inputs.operations, 8, "gloo", None)
    assert link is not None
    assert link.separable
    assert link.alpha_seconds == pytest.approx(1e-3, rel=0.15)
    assert link.beta_seconds_per_byte == pytest.approx(8e-9, rel=0.15)


def test_probes_cost_time_and_bring_evidence() -> None:
    asked: list[Inputs] = []

    def ask(inputs: Inputs) -> Outcome:
        asked.append(inputs)
        probed = {o.bytes for o in inputs.operations} >= {4096, 1 << 20}
        sizes = () if probed else (4096, 1 << 20)
        return Outcome("keep" if probed else "probe", "", probe_bytes=sizes)

    result = Driver(case(noise=Noise(), steps=400)).run(ask)
    alone = Driver(case(noise=Noise(), steps=400)).run(lambda _: Outcome("keep", ""))
    assert result.decisions["probe"] == 1
    assert result.decisions["keep"] > 1
    assert result.probe_seconds > alone.probe_seconds > 0
    asked_for = result.probe_seconds - alone.probe_seconds  # beside that of the start
    assert result.seconds == pytest.approx(alone.seconds + asked_for)
    assert {4096, 1 << 20} <= {o.bytes for o in asked[1].operations}, "it came in time"
    assert not asked[-1].probing


def test_steps_below_the_floor_are_counted() -> None:
    of = case(steps=100)
    bold = Driver(of).fixed(everywhere(of, Option("topk", 0.001, "allgather")))
    assert bold.below_floor == 1


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (Outcome("switch", "", (BF16,)), "1 options for 5 buckets"),
        (Outcome("switch", "", (Option("topk", 0.1, "ring"),) * 5), "cannot do"),
        (Outcome("switch", "", (Option("none", 2.0),) * 5), "ratio"),
    ],
)
def test_answers_that_cannot_be_carried_out_are_refused(outcome: Outcome, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Driver(case(steps=100)).run(lambda _: outcome)

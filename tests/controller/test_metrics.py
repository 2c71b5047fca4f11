from __future__ import annotations

import asyncio
import subprocess
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gradpilot.controller.metrics import COUNTERS, GAUGES, MAX_LABEL, label
from gradpilot.controller.server import Controller
from gradpilot.controller.totals import COMPRESSORS
from gradpilot.policies.base import Inputs, Outcome
from gradpilot.policies.history import History, StepError
from gradpilot.protos.messages import Counters, Plan
from tests.conftest import require_tool
from tests.controller import fakes
from tests.controller.fakes import FakeAgent, agents, serving, until

# fmt: off
REQUIRED = {
    "build_info", "runs", "sessions", "term", "ranks", "step", "step_seconds",
    "predicted_step_seconds", "compute_seconds", "exposed_seconds", "compression_seconds",
    "synchronisation_seconds", "straggle_seconds", "link_latency_seconds",
    "link_bandwidth_bytes_per_second", "link_age_seconds", "gain_ratio", "wire_ratio",
    "wire_bytes_total", "dense_bytes_total", "plan_id", "plan_info", "plan_kept_ratio",
    "plan_skip_steps", "front_size", "switches_total", "decisions_total",
    "decision_seconds_bucket", "policy_errors_total", "reports_total", "reports_refused_total",
    "agent_reports_dropped_total", "nonfinite_steps_total", "agreement_failures_total",
    "frozen", "loss", "emulated", "plans_undone_total", "blacklisted_options",
    "step_prediction_ratio", "step_prediction_error_ratio_bucket",
}
# fmt: on
"""Names that dashboards rely on, without the prefix."""

SERIES_OF_A_RUN = 80
"""Declared bound of series per run and model."""

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


async def scrape(controller: Controller) -> tuple[str, Samples]:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{controller.http_port}/metrics")
    assert answer.status_code == 200
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return answer.text, found


RUN = (("model", "model"), ("run", "run"))
RUN_ONLY = {"run", "model"}


def keys(series: dict[tuple[tuple[str, str], ...], float]) -> set[str]:
    return {key for labels in series for key, _ in labels}


@pytest.mark.asyncio(loop_scope="session")
async def test_every_required_metric_is_there_and_tells_the_truth() -> None:
    async with serving() as controller, agents(controller, emulated=True) as ranks:
        link = fakes.Link()
        for rank in ranks:
            await rank.report(loss=2.0 + rank.rank)
        plan = await ranks[0].wait(Plan)
        for rank in ranks:
            await rank.report(plan, loss=1.0 + rank.rank, counters=Counters(switches=1, steps=30))
        run = controller.runs.get("run", "model")
        assert run is not None
        await until(lambda: run.decisions.outcomes["keep"] == 1)
        _, found = await scrape(controller)
        assert {f"gradpilot_{name}" for name in REQUIRED} <= set(found)

        def value(name: str) -> float:
            return found[f"gradpilot_{name}"][RUN]

        assert value("ranks") == 4
        assert value("step") == 29
        assert value("plan_id") == 1
        assert value("loss") == 2.5
        assert value("emulated") == 1
        assert value("frozen") == 0
        assert value("wire_ratio") == pytest.approx(0.5)
        assert value("gain_ratio") == pytest.approx(1.0)
        assert value("compute_seconds") == pytest.approx(0.1)
        assert value("predicted_step_seconds") == pytest.approx(0.2)
        assert value("step_prediction_ratio") == pytest.approx(value("step_seconds") / 0.2)
        assert value("link_bandwidth_bytes_per_second") == pytest.approx(1e9)
        assert 0 <= value("link_age_seconds") < 5
        size = 2 * run.layout.buckets[0].elements if run.layout else 0
        fastest = link.seconds("all_reduce", size, 4, 3)
        assert value("synchronisation_seconds") == pytest.approx(4 * fastest)
        assert value("straggle_seconds") == pytest.approx(4 * link.straggle * 1.5 / 4)
        assert value("reports_total") == 8
        assert value("switches_total") == 1
        assert found["gradpilot_plan_info"] == {
            (("collective", "native"), ("compressor", "bf16"), *RUN): 1.0
        }
        outcomes = {dict(k)["outcome"]: v for k, v in found["gradpilot_decisions_total"].items()}
        assert outcomes == {"switch": 1, "keep": 1, "pinned": 0, "probe": 0, "error": 0}
        assert found["gradpilot_decision_seconds_count"][RUN] == 2


@pytest.mark.asyncio(loop_scope="session")
async def test_labels_are_bounded_and_never_job_or_instance() -> None:
    hostile = ["x" * 256, "y" * 256, 'quote"{}', "ünï"]
    async with serving() as controller:
        connected = []
        for name in hostile:
            for rank in range(3):
                agent = await FakeAgent(rank, 3).connect(
                    controller.grpc_port, run=name, model=name[::-1]
                )
                connected.append(agent)
                await agent.report()
        await until(lambda: sum(r.reports_taken for r in controller.runs) == 12)
        _, found = await scrape(controller)
        names = {key for series in found.values() for labels in series for key, _ in labels}
        assert names <= {
            *("run", "model", "outcome", "reason", "compressor", "collective", "le"),
            *("version", "python", "code"),
        }
        texts = [v for series in found.values() for labels in series for _, v in labels]
        assert max(map(len, texts)) <= MAX_LABEL
        assert len(found["gradpilot_ranks"]) == len(hostile)  # clipped, yet told apart
        of_runs = sum(1 for series in found.values() for labels in series if "run" in dict(labels))
        assert of_runs <= SERIES_OF_A_RUN * len(hostile)
        for agent in connected:
            await agent.leave()


def learning(policy: str, inputs: Inputs) -> Outcome:
    """Keep the plan, each time with one more error of a prediction."""
    known = inputs.history.errors
    name = f"plug-in{len(known)}"
    error = StepError(name, name, 1.0 + 0.01 * len(known), False, inputs.step)
    return Outcome("keep", "as it is", history=History(errors=(*known, error)))


@pytest.mark.asyncio(loop_scope="session")
async def test_prediction_errors_are_counted_once_with_bounded_labels() -> None:
    async with serving(learning) as controller, agents(controller) as ranks:
        looks = COMPRESSORS + 4
        for number in range(1, looks + 1):
            for rank in ranks:
                await rank.report()
            run = await until(lambda: controller.runs.get("run", "model"))
            async with asyncio.timeout(10):
                while run.decisions.outcomes["keep"] < number:
                    await asyncio.sleep(0.01)
        _, found = await scrape(controller)
        name = "gradpilot_step_prediction_error_ratio"
        assert found[f"{name}_count"][RUN] == looks
        assert found[f"{name}_sum"][RUN] == pytest.approx(0.01 * sum(range(looks)))
        recent = found["gradpilot_recent_prediction_error_ratio"]
        assert len(recent) == COMPRESSORS
        newest = dict(RUN) | {"compressor": f"plug-in{looks - 1}"}
        assert recent[tuple(sorted(newest.items()))] == pytest.approx(0.01 * (looks - 1))
        assert sum(len(s) for n, s in found.items() if keys(s) >= RUN_ONLY) <= SERIES_OF_A_RUN


@pytest.mark.asyncio(loop_scope="session")
async def test_the_series_of_an_ended_run_vanish_and_old_labels_do_not_linger() -> None:
    async with serving(fakes.alternate, run_grace_seconds=0.3) as controller:
        async with agents(controller) as ranks:
            for number in (1, 2, 3):
                for rank in ranks:
                    await rank.report(rank.newest_plan())
                await ranks[0].wait(Plan, number=number)
                for rank in ranks:
                    await rank.wait(Plan, number=number)
            _, found = await scrape(controller)
            assert len(found["gradpilot_plan_info"]) == 1
        _, found = await scrape(controller)
        assert found["gradpilot_ranks"][RUN] == 0  # within the grace
        await until(lambda: not len(controller.runs))
        text, found = await scrape(controller)
        assert 'run="run"' not in text
        assert found["gradpilot_runs"] == {(): 0.0}


@pytest.mark.asyncio(loop_scope="session")
async def test_counters_do_not_go_backwards_when_agents_start_again() -> None:
    async with serving() as controller:
        for incarnation, counts, total in (("a", (100, 300), 300), ("b", (50, 80), 380)):
            agent = await FakeAgent(0, 1).connect(controller.grpc_port, incarnation=incarnation)
            for count in counts:
                await agent.report(counters=Counters(wire_bytes=count, switches=count))
            run = await until(lambda: controller.runs.get("run", "model"))
            wanted = 2 if incarnation == "a" else 4
            async with asyncio.timeout(5):
                while run.reports_taken < wanted:
                    await asyncio.sleep(0.01)
            assert run.totals["wire_bytes"] == total
            await agent.leave()
        _, found = await scrape(controller)
        assert found["gradpilot_wire_bytes_total"][RUN] == 380
        assert found["gradpilot_switches_total"][RUN] == 380


@pytest.mark.asyncio(loop_scope="session")
async def test_promtool_accepts_it() -> None:
    require_tool("promtool", "apt-get install prometheus")
    async with serving() as controller, agents(controller) as ranks:
        for rank in ranks:
            await rank.report(loss=1.0)
        await ranks[0].wait(Plan)
        text, _ = await scrape(controller)
        checked = subprocess.run(
            ["promtool", "check", "metrics"],
            input=text,
            text=True,
            capture_output=True,
            timeout=20,
            check=False,
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_scrape_of_many_runs_is_fast() -> None:
    async with serving() as controller, agents(controller) as ranks:
        for rank in ranks:
            await rank.report()
        await ranks[0].wait(Plan)
        run = controller.runs.get("run", "model")
        assert run is not None
        for number in range(200):
            controller.runs._runs[f"r{number}", "m"] = run
        started = time.perf_counter()
        await scrape(controller)
        assert time.perf_counter() - started < 2.0
        for number in range(200):
            del controller.runs._runs[f"r{number}", "m"]


def test_names_have_help_and_are_unique() -> None:
    table = [(name, text) for name, text, _ in (*GAUGES, *COUNTERS)]
    assert len({name for name, _ in table}) == len(table)
    for _, text in table:
        assert text.endswith(".")
        assert text[0].isupper() or text[0] == "1"


def test_labels_stay_different() -> None:
    assert label("plain") == "plain"
    assert label("a" * MAX_LABEL) == "a" * MAX_LABEL
    long = [label("a" * 300 + end) for end in "bc"]
    assert len(set(long)) == 2
    assert {len(text) for text in long} == {MAX_LABEL}
    assert "\n" not in label("two\nlines")
    assert label("two\nlines") != label("two?lines")

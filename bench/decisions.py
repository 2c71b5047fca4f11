"""How good decisions are: every policy on simulated networks, against who knows the future.

    python -m bench.decisions [--output FILE] [--traces N] [--workers N] [--quick]

Traces of six kinds times models times numbers of ranks; all policies meet the same network and the
same noise (``docs/simulator.md``). Time is measured in decision periods, so that a fast and a slow
job change equally often from a controller's view: a round of a trace has ``PERIODS`` of them, and a
job lasts about one round. A second part halves and doubles the bandwidth once and measures how long
``adaptive`` takes to answer.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench import results_file
from gradpilot.policies.base import POLICIES, PolicySettings
from gradpilot.protos.messages import BF16, DENSE
from gradpilot.simulate.compare import Comparison, Contender, compare
from gradpilot.simulate.driver import Case, Driver, Timing
from gradpilot.simulate.engine import Noise, Weather
from gradpilot.simulate.jobs import JOBS, make_job
from gradpilot.simulate.oracle import Clairvoyant
from gradpilot.simulate.traces import Link, Trace, make_trace
from gradpilot.simulate.world import World

KINDS = ("constant", "steps", "walk", "diurnal", "burst", "c1", "c2")
RANKS = (4, 8, 64, 1024)
FEWER = (4, 8, 64)
"""Where rivals are run, and where the time to an answer is measured."""

RIVALS = ("flexible", "accordion", "gravac", "kimad")
MORE = {"flexible": ("tree",)}
"""Carriers that a method is about beside those that everyone may choose."""

TRACES = 60
PERIODS = 40
LOOKS = 2
"""Decisions in a decision period; a plan can come into force only once in it."""

EARLY = 2
EARLY_SECONDS = 150.0
"""Decision periods, and most seconds, at the begin of a job, in which decisions are as frequent as
in production."""

LARGE = 64
"""From so many ranks on the collectives are NCCL's: nobody runs gloo there."""

WORTH_IT = 0.1
"""A change to which the best option loses this share is one that must be answered."""


@dataclass(frozen=True, slots=True)
class Place:
    """One case by its numbers; small enough to be sent to another process."""

    kind: str
    seed: int
    model: str
    ranks: int
    periods: int = PERIODS


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--traces", type=int, default=TRACES, help="traces, kinds in turn")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no further trace after so long"
    )
    parser.add_argument("--quick", action="store_true", help="a few small cases, for tests")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    if arguments.quick:
        places = [Place(kind, 0, "resnet50", 8, 4) for kind in ("constant", "steps")]
        changes = [(8, 2.0)]
    else:
        places = [
            Place(KINDS[i % len(KINDS)], i // len(KINDS), model, ranks)
            for i in range(arguments.traces)
            for model in JOBS
            for ranks in RANKS
        ]
        changes = [(ranks, factor) for ranks in FEWER for factor in (0.5, 2.0)]
    cases: list[dict[str, Any]] = []
    traces = 0
    with ProcessPoolExecutor(arguments.workers) as pool:
        # One trace after another, so that a run that is cut short has whole ones.
        for traces, (_, some) in enumerate(groupby(places, lambda p: (p.kind, p.seed)), 1):
            cases += [row for rows in pool.map(measure, some) for row in rows]
            print(f"{traces} traces, {time.monotonic() - begun:.0f} s", flush=True)
            if time.monotonic() - begun > 60 * arguments.minutes:
                break
    answers = [row for ranks, factor in changes for row in reactions(ranks, factor)]
    rows = [*summaries(cases), *answers]
    options = f" --traces {traces}" if traces != TRACES and not arguments.quick else ""
    options += " --quick" if arguments.quick else ""
    path = results_file.write(
        "decisions",
        f"python -m bench.decisions{options}",
        sorted({place.seed for place in places}),
        rows,
        verdicts(cases, answers),
        arguments.output,
    )
    print(f"{path}: {traces} traces, {time.monotonic() - begun:.0f} s")


# --- cases -------------------------------------------------------------------------------------


def contenders(ranks: int) -> tuple[Contender, ...]:
    """Return every policy that changes plans, with many ranks only ``adaptive``."""
    return tuple(
        Contender(name, collectives=(*PolicySettings().collectives, *MORE.get(name, ())))
        for name in POLICIES.names()
        if name == "adaptive" or (name != "fixed" and ranks in FEWER)
    )


def case_at(place: Place) -> Case:
    """Return a case whose trace and length are counted in decision periods."""
    backend = "nccl" if place.ranks >= LARGE else "gloo"
    world = World(make_job(place.model), place.ranks, backend)
    settings = PolicySettings()
    shape = make_trace(place.kind, place.seed, 1.0)
    typical = typical_step(world, shape)
    period = max(Timing().decision_seconds, settings.interval * typical)
    trace = make_trace(place.kind, place.seed, place.periods * period)
    steps = max(round(place.periods * period / typical), 1)
    return Case(world, trace, steps, place.seed, Noise(), settings, pace(period))


def pace(period: float) -> Timing:
    """Return when to report and decide: as a controller does at first, later thinned out.

    More decisions than a few in a decision period have no effect but on what they cost here; while
    a run warms up each of them counts.
    """
    usual = Timing()
    thin = max(period / (LOOKS * usual.decision_seconds), 1.0)
    early = min(EARLY * period, EARLY_SECONDS)
    return replace(usual, thin_after=early, thin=thin, late=PERIODS * period)


def typical_step(world: World, trace: Trace) -> float:
    """Return the geometric mean over a trace of the step time of bf16."""
    costs = world.costs((BF16,))
    logs = [math.log(world.seconds(costs, link)[0]) for link in trace.links]
    ends = (*trace.starts[1:], trace.period if math.isfinite(trace.period) else 1.0)
    lengths = [end - start for start, end in zip(trace.starts, ends, strict=True)]
    return math.exp(float(np.average(logs, weights=lengths)))


def measure(place: Place) -> list[dict[str, Any]]:
    """Return a row for every contender in one case."""
    case = case_at(place)
    found = compare(case, contenders(place.ranks))
    plain = {}
    for option in (DENSE, BF16):  # in force from the first step on: nothing has to be decided
        plan = (option,) * len(case.world.job.layout.buckets)
        driver = Driver(case, Weather(case.world, case.noise, case.seed))
        plain[Contender("fixed", option).name] = driver.fixed(plan)
    found = replace(found, results={**plain, **found.results})
    return [_row(place, found, name) for name in found.results]


def _row(place: Place, found: Comparison, name: str) -> dict[str, Any]:
    result = found.results[name]
    at = [switch.step for switch in result.switches]
    gaps = [b - a for a, b in pairwise(at)]
    return {
        "kind": place.kind,
        "model": place.model,
        "ranks": place.ranks,
        "policy": name,
        "seconds": result.seconds,
        "regret": found.regret(name),
        "versus_fixed": found.versus_fixed(name),
        "switches": len(result.switches),
        "least_gap": min(gaps, default=math.inf),
        "below_floor": result.below_floor,
    }


def reactions(ranks: int, factor: float) -> Iterator[dict[str, Any]]:
    """Yield how many decision periods pass from a change of bandwidth to the answer.

    Only where the option that was best before is so much worse than the best one after it that it
    must be replaced.
    """
    for model in JOBS:
        backend = "nccl" if ranks >= LARGE else "gloo"
        world = World(make_job(model), ranks, backend)
        for gbps in (0.5, 2.0, 8.0):
            before, after = Link.of(0.1, gbps), Link.of(0.1, gbps * factor)
            step = float(world.seconds(world.costs((BF16,)), before)[0])
            settings = PolicySettings()
            period = max(Timing().decision_seconds, settings.interval * step)
            change = 10 * period
            trace = Trace("change", (0.0, change), (before, after))
            steps = round(60 * period / step)  # compressed, they are much shorter
            case = Case(world, trace, steps, 0, Noise(), settings, pace(period))
            weather = Weather(world, case.noise, 0)
            result = Driver(case, weather).run("adaptive")
            if result.seconds < change + 4 * period:
                continue  # over before there was time to answer
            using = [s.options[0] for s in result.switches if s.seconds < change] or [DENSE]
            if not _must_answer(case, weather, using[-1], after):
                continue
            answer = [s.seconds for s in result.switches if s.seconds >= change]
            slower = float(world.seconds(world.costs((using[-1],)), after)[0])
            length = max(Timing().decision_seconds, settings.interval * slower)
            yield {
                "kind": "reaction",
                "model": model,
                "ranks": ranks,
                "gbps": gbps,
                "factor": factor,
                "periods": round((answer[0] - change) / length, 3) if answer else None,
            }


def _must_answer(case: Case, weather: Weather, using: Any, after: Link) -> bool:
    clairvoyant = Clairvoyant(case, weather, (using,))
    return clairvoyant.loss(using, after, 0.5) >= WORTH_IT


# --- results -----------------------------------------------------------------------------------


def summaries(cases: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield mean and worst over the traces of a kind, for every policy, model and rank count."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in cases:
        key = (row["kind"], row["model"], row["ranks"], row["policy"])
        groups.setdefault(key, []).append(row)
    for (kind, model, ranks, policy), rows in groups.items():
        yield {
            "kind": kind,
            "model": model,
            "ranks": ranks,
            "policy": policy,
            "traces": len(rows),
            "mean_seconds": round(fmean(row["seconds"] for row in rows), 2),
            "mean_regret": round(fmean(row["regret"] for row in rows), 4),
            "worst_regret": round(max(row["regret"] for row in rows), 4),
            "worst_versus_fixed": round(max(row["versus_fixed"] for row in rows), 4),
            "mean_switches": round(fmean(row["switches"] for row in rows), 2),
            "mean_below_floor": round(fmean(row["below_floor"] for row in rows), 4),
        }


def verdicts(
    cases: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return whether the targets are met, and beside that what every policy reaches."""
    adaptive = [row for row in cases if row["policy"] == "adaptive"]
    mean = fmean(row["regret"] for row in adaptive)
    worst = max(row["regret"] for row in adaptive)
    still = [row["versus_fixed"] for row in adaptive if row["kind"] == "constant"]
    gap = min(row["least_gap"] for row in adaptive)
    dwell = PolicySettings().dwell_steps
    found = [
        _verdict("adaptive, mean regret, %", "<= 5", 100 * mean, mean <= 0.05),
        _verdict("adaptive, worst regret, %", "<= 15", 100 * worst, worst <= 0.15),
        _verdict(
            "adaptive / best fixed plan, worst constant network", "<= 1.03", max(still),
            max(still) <= 1.03,
        ),
        results_file.verdict(
            "adaptive, least steps between two switches", f">= {dwell}",
            gap if math.isfinite(gap) else "no two switches", gap >= dwell,
        ),
    ]  # fmt: skip
    rival = _best_rival(cases)
    if rival is not None:
        name, ratio = rival
        title = f"{name}, the best rival / adaptive, changing networks, geometric mean"
        found.append(_verdict(title, ">= 1.3", ratio, ratio >= 1.3))
    periods = [row["periods"] for row in answers]
    if periods:
        slowest = "never" if None in periods else max(periods)
        title = f"adaptive, decision periods to answer a 2x change, slowest of {len(periods)}"
        in_time = slowest != "never" and max(periods) <= 2
        found.append(results_file.verdict(title, "<= 2", slowest, in_time))
    return found


def _best_rival(cases: Sequence[dict[str, Any]]) -> tuple[str, float] | None:
    """Return the rival with the least time on changing networks, over adaptive's."""
    changing = [row for row in cases if row["kind"] != "constant"]
    among = [row for row in changing if row["ranks"] in FEWER]
    own = [row["seconds"] for row in among if row["policy"] == "adaptive"]
    ratios = {}
    for name in RIVALS:
        seconds = [row["seconds"] for row in changing if row["policy"] == name]
        if seconds and len(seconds) == len(own):
            ratios[name] = math.exp(fmean(np.log(np.array(seconds) / np.array(own)).tolist()))
    return min(ratios.items(), key=lambda pair: pair[1]) if ratios else None


def _verdict(name: str, target: str, measured: float, holds: bool) -> dict[str, Any]:
    return results_file.verdict(name, target, round(measured, 3), holds)


if __name__ == "__main__":
    main()

"""How long a decision's solve takes, and how far NSGA-II is from the exact front.

    python -m bench.solver [--output FILE] [--repeats N]

* exact: about 5,000 uniform candidates over 20 buckets, evaluated, filtered, chosen;
* NSGA-II: 20 buckets in 4 groups, and for reference a group for each bucket;
* half a thousand: the same groups with about 500 candidates each, at the 95th percentile; beside it
  the whole decision, link and guards included;
* loop: how much later than due a task on the controller's event loop wakes while the policy process
  decides over 5,002 candidates and 4 groups, at worst; beside it the same without a decision, which
  is what the machine adds;
* gap: on spaces that can be enumerated but are larger than NSGA-II's budget of points, the
  hypervolume of the front that it finds over that of the exact front, and the share of exact points
  found. It starts from random points there, without the seeds and the final polish that a decision
  gives it. As many points drawn at random stand beside it: a large archive alone has a hypervolume
  near one.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import results_file
from gradpilot.controller.latency import keep_the_loop_free
from gradpilot.controller.solver import Solver
from gradpilot.policies import solver
from gradpilot.policies.adaptive import Adaptive
from gradpilot.policies.base import BucketState, Inputs, Operation, PolicySettings
from gradpilot.policies.choice import allowed, choose
from gradpilot.policies.cost import coefficients
from gradpilot.policies.evaluation import Evaluation
from gradpilot.policies.front import non_dominated, normalise
from gradpilot.policies.history import History
from gradpilot.policies.problem import Space
from gradpilot.protos.messages import (
    Bucket,
    BucketRounds,
    ComputeSample,
    Family,
    LadderPoint,
    Layout,
    LinkEstimate,
    WireRound,
)
from gradpilot.warm_up import Warmth

Floats = NDArray[np.float64]

LINK = LinkEstimate(alpha_seconds=1e-3, beta_seconds_per_byte=8e-8)  # 100 Mbit/s
RANKS = 8
RATIOS = (0.001, 0.003, 0.01, 0.03, 0.1)
SEEDS = tuple(range(10))

HALF_THOUSAND = 17
"""Ratios of a family that make 494 uniform candidates."""

BEAT_SECONDS = 0.001
"""How often the task on the event loop wants to wake."""

# Cumulative energy of a heavy-tailed gradient at messages.ENERGY_RATIOS.
ENERGY = (0.01, 0.025, 0.06, 0.10, 0.16, 0.24, 0.35, 0.48, 0.63, 0.78, 0.91, 0.98, 1.0)

RING = ("native", "ring")


def make_inputs(sizes: Sequence[int], ratios: int, ranks: int = RANKS, seed: int = 0) -> Inputs:
    """Return a decision over six families, three of them with a ratio and ring skips."""

    def family(
        name: str, by: tuple[str, ...], kept: Sequence[float], rounds: Callable[[int], Any],
        factor: float, exponent: float,
    ) -> Family:  # fmt: skip
        ladder = tuple(
            LadderPoint(r, tuple(BucketRounds(rounds(max(1, int(n * r)))) for n in sizes))
            for r in kept
        )
        model = "energy" if len(kept) > 1 else "constant"
        return Family(name, (), by, ladder, model, factor, exponent)

    def pair(k: int) -> tuple[WireRound, ...]:
        return (WireRound("broadcast", 4 * k, False), WireRound("all_reduce", 4 * k))

    families = (
        family("artopk", RING, RATIOS, pair, 0.75, 0.25),
        family("bf16", RING, (1.0,), lambda k: (WireRound("all_reduce", 2 * k),), 1.0, 0.0),
        family("none", RING, (1.0,), lambda k: (WireRound("all_reduce", 4 * k),), 1.0, 0.0),
        family("topk", ("allgather",), RATIOS, lambda k: (WireRound("all_gather", 8 * k),), 1, 0.2),
        family("topkc", RING, RATIOS, lambda k: (WireRound("all_reduce", 4 * k),), 0.5, 0.2),
        family("randomk", RING, RATIOS, lambda k: (WireRound("all_reduce", 4 * k),), 0.1, 0.3),
    )
    cost = {"artopk": 9e-9, "bf16": 3e-10, "none": 0.0, "topk": 9e-9, "topkc": 3e-10}
    samples = tuple(
        ComputeSample(f.compressor, (), p.ratio, n, 3e-5 + each * n, 2e-5 + 0.05 * each * n)
        for f in families
        for each in (cost.get(f.compressor, 2e-10),)
        for p in f.ladder
        for n in (1 << 14, 1 << 19)
    )
    rng = np.random.default_rng(seed)
    squares = [float(n * rng.uniform(0.2, 5)) for n in sizes]
    # A residual that has built up: then the energy curve is taken as it is.
    states = tuple(
        BucketState(0.01 * i, -1.0, square, 0.6 * square, ENERGY)
        for i, square in enumerate(squares)
    )
    layout = Layout.of(tuple(Bucket(f"bucket{i}", i, n) for i, n in enumerate(sizes)))
    settings = PolicySettings(ratios=ratios, per_bucket=True, solver_seconds=600.0)
    return Inputs(
        run="bench",
        model="synthetic",
        world_size=ranks,
        step=1000,
        seed=seed,
        layout=layout,
        families=families,
        compute=samples,
        operations=(),
        buckets=states,
        compute_seconds=0.3,
        history=History(warmth=Warmth(warm=True)),  # a warm run, which may skip
        settings=settings,
    )


def twenty_buckets() -> list[int]:
    """Sizes as DDP makes them: many near the cap, some smaller ones."""
    return [250_000, *[6_500_000] * 12, *[2_400_000] * 4, 800_000, 60_000, 1_000]


def exact_solve(space: Space, settings: PolicySettings) -> Evaluation:
    """Evaluate, filter and choose over the whole uniform space."""
    evaluation = space.uniform()
    choice = choose(evaluation, settings)
    assert choice is not None
    return evaluation


def timed(action: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Return median, least and greatest milliseconds."""
    spent = []
    for _ in range(repeats):
        started = time.monotonic()
        action()
        spent.append(1e3 * (time.monotonic() - started))
    return statistics.median(spent), min(spent), max(spent)


def percentile(action: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Return median and 95th percentile of the milliseconds that something takes."""
    spent = []
    for _ in range(repeats):
        started = time.monotonic()
        action()
        spent.append(1e3 * (time.monotonic() - started))
    return statistics.median(spent), float(np.percentile(spent, 95))


def timed_link(inputs: Inputs) -> Inputs:
    """Return inputs with as many timed collectives as a controller keeps of a job: 13 kinds."""
    made = []
    for i in range(24):
        for size in np.geomspace(4096, 16 << 20, 13).astype(int).tolist():
            a, b = coefficients("all_reduce", inputs.world_size)
            seconds = a * LINK.alpha_seconds + b * size * LINK.beta_seconds_per_byte
            age = float(24 - i)
            made.append(Operation(i, "all_reduce", size, 0, seconds, 0.0, age))
    return replace(inputs, operations=tuple(made), step_seconds=2.0)


async def loop_lags(inputs: Inputs, repeats: int) -> tuple[list[float], list[float]]:
    """Return by how many milliseconds a task woke too late, at worst, during each decision.

    Returns:
        The same for as long without a decision, and with one.
    """

    async def beat(until: asyncio.Event) -> float:
        worst = 0.0
        while not until.is_set():
            due = time.monotonic() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            worst = max(worst, 1e3 * (time.monotonic() - due))
        return worst

    async def during(action: Any) -> float:
        done = asyncio.Event()
        watching = asyncio.create_task(beat(done))
        await asyncio.sleep(0)
        await action
        done.set()
        return await watching

    solver_process = Solver()
    alone, deciding = [], []
    before = sys.getswitchinterval()
    keep_the_loop_free()
    try:
        await solver_process.start()
        await solver_process.decide("adaptive", inputs)  # the first one imports pymoo
        for _ in range(repeats):
            started = time.monotonic()
            deciding.append(await during(solver_process.decide("adaptive", inputs)))
            alone.append(await during(asyncio.sleep(time.monotonic() - started)))
    finally:
        solver_process.close()
        sys.setswitchinterval(before)
        gc.unfreeze()
    return alone, deciding


def least_cost(evaluation: Evaluation, settings: PolicySettings) -> float:
    """Return the least step time / efficiency of what may be chosen."""
    return float(evaluation.cost[allowed(evaluation, settings)].min())


def hypervolume(front: Floats, reference: Floats) -> float:
    """Return the hypervolume of a front after scaling by the exact one, reference point 1.1."""
    from pymoo.indicators.hv import HV

    low, high = reference.min(axis=0), reference.max(axis=0)
    width = np.where(high > low, high - low, 1.0)
    return float(HV(ref_point=np.full(front.shape[1], 1.1))((front - low) / width))


def gap(exact: Evaluation, found: Evaluation, settings: PolicySettings) -> dict[str, Any]:
    """Compare the candidates of a search with the exact ones."""
    keep = allowed(exact, settings)
    true = exact.objectives[keep][non_dominated(exact.objectives[keep])]
    ok = allowed(found, settings)
    ours = found.objectives[ok][non_dominated(found.objectives[ok])]
    assert normalise(true)[1].all()
    hits = {tuple(row) for row in true.round(12)} & {tuple(row) for row in ours.round(12)}
    best, mine = choose(exact, settings), choose(found, settings)
    assert best is not None
    assert mine is not None
    return {
        "front_points": len(true),
        "front_found_share": len(hits) / len(true),
        "found_on_front_share": len(hits) / len(ours),
        "hypervolume_ratio": hypervolume(ours, true) / hypervolume(true, true),
        "cost_ratio": float(found.cost[mine.index] / exact.cost[best.index]),
    }


def run(repeats: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure everything; return rows and verdicts."""
    rows: list[dict[str, Any]] = []

    def row(what: str, spent: Sequence[float] = (), **more: Any) -> None:
        figures = dict(zip(("median_ms", "min_ms", "max_ms"), spent, strict=False))
        rows.append({"what": what, **{k: round(v, 3) for k, v in figures.items()}, **more})

    wide = make_inputs(twenty_buckets(), 178)
    space = Space(wide, LINK)
    count = len(space)
    exact_solve(space, wide.settings)
    exact = timed(lambda: exact_solve(space, wide.settings), repeats)
    row("exact uniform: evaluate, filter, choose", exact, candidates=count, buckets=20)
    building = timed(lambda: Space(wide, LINK), repeats)
    row("exact uniform: build the space", building, candidates=count, buckets=20)

    usual = make_inputs(twenty_buckets(), 24)
    grid = Space(usual, LINK)
    uniform = grid.uniform()
    groups = grid.groups()

    def search(of: Any) -> Callable[[], Any]:
        return lambda: solver.per_bucket(grid, uniform, of, lambda e: allowed(e, usual.settings))

    times = {}
    for name, of in (("in groups", groups), ("each alone", np.arange(20))):
        mixed, how = search(of)()  # the first one imports pymoo
        times[name] = timed(search(of), max(3, repeats // 3))
        saved = 1 - least_cost(mixed, usual.settings) / least_cost(uniform, usual.settings)
        what = f"NSGA-II and polish, 20 buckets {name}"
        row(what, times[name], groups=int(of.max()) + 1, detail=how, saved_over_uniform=saved)

    half = timed_link(make_inputs(twenty_buckets(), HALF_THOUSAND))
    halves = Space(half, LINK)
    options, of_halves = halves.uniform(), halves.groups()
    solve = percentile(
        lambda: solver.per_bucket(halves, options, of_halves, lambda e: allowed(e, half.settings)),
        max(5, 2 * repeats),
    )
    decision = percentile(lambda: Adaptive().decide(half), max(5, repeats))
    for what, (median, late) in (("solve", solve), ("whole decision", decision)):
        row(
            f"{what}, 20 buckets in groups, half a thousand candidates",
            candidates=len(options.gain), groups=int(of_halves.max()) + 1,
            median_ms=round(median, 3), p95_ms=round(late, 3),
        )  # fmt: skip
    alone, deciding = asyncio.run(loop_lags(timed_link(wide), max(3, repeats)))
    for what, lags in (("without a decision", alone), ("during a decision", deciding)):
        row(
            f"event loop, latest wake {what}", candidates=count,
            median_ms=round(statistics.median(lags), 3), max_ms=round(max(lags), 3),
        )  # fmt: skip

    volumes, shares, costs, leads = [], [], [], []
    pair = make_inputs([2_000_000, 20_000], 5, ranks=4)
    small = Space(pair, LINK)
    mixed, how = solver.per_bucket(
        small, small.uniform(), small.groups(), lambda e: allowed(e, pair.settings)
    )
    whole = space.uniform()
    for seed in SEEDS:
        found = solver.nsga2_uniform(space, seed)
        one = gap(whole, found, wide.settings)
        row("gap, uniform space", seed=seed, candidates=count, points=len(found.gain), **one)
        drawn = np.random.default_rng(seed).choice(count, len(found.gain), replace=False)
        random = gap(whole, space.evaluate(np.repeat(drawn[:, None], 20, axis=1)), wide.settings)
        row("gap, uniform space, random points", seed=seed, points=len(drawn), **random)
        leads.append(one["front_found_share"] / random["front_found_share"])
        both, _ = solver.search_groups(small, small.groups(), seed)
        two = gap(mixed, both, pair.settings)
        row("gap, two groups", seed=seed, candidates=len(mixed.gain), **two)
        volumes += [one["hypervolume_ratio"], two["hypervolume_ratio"]]
        shares.append(one["front_found_share"])
        costs += [one["cost_ratio"], two["cost_ratio"]]

    verdicts = [
        _below(f"exact enumeration of {count} candidates, median ms", 20, exact[0]),
        _below("NSGA-II for 20 buckets in groups, median ms", 300, times["in groups"][0]),
        _below("NSGA-II for 20 buckets each alone, median ms", 300, times["each alone"][0]),
        _below(f"solve of {len(options.gain)} candidates per group, p95 ms", 100, solve[1]),
        _below("event loop blocked while a decision is taken, greatest ms", 5, max(deciding)),
        _above("hypervolume of NSGA-II over exact, least of all seeds", 0.95, min(volumes)),
        _above("share of the exact uniform front found, median", 0.8, statistics.median(shares)),
        _above("that share over the one of as many random points, least", 1, min(leads)),
        _below("cost of NSGA-II's choice over the exact one's, greatest", 1.05, max(costs)),
    ]
    return rows, verdicts


def _below(name: str, bound: float, measured: float) -> dict[str, Any]:
    return results_file.verdict(name, f"< {bound}", round(measured, 4), measured < bound)


def _above(name: str, bound: float, measured: float) -> dict[str, Any]:
    return results_file.verdict(name, f"> {bound}", round(measured, 4), measured > bound)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.solver", description=__doc__)
    parser.add_argument("--output", type=Path, help="result file (bench/results/solver.json)")
    parser.add_argument("--repeats", type=int, default=21, help="timed repetitions")
    options = parser.parse_args(arguments)
    rows, verdicts = run(max(1, options.repeats))
    path = results_file.write(
        "solver", "python -m bench.solver", SEEDS, rows, verdicts, options.output
    )
    for one in verdicts:
        word = "ok  " if one["holds"] else "MISS"
        print(f"{word} {one['name']}: {one['measured']} (target {one['target']})")
    print(path)


if __name__ == "__main__":
    main()

"""Rows and verdicts of the result file, and the same as a table for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import results_file
from bench.efficiency_runs import divergence, models
from bench.efficiency_runs.analysis import exponent, interval, rank_correlation
from bench.efficiency_runs.methods import METHODS
from bench.efficiency_runs.models import Points
from bench.efficiency_runs.summary import Dense, Line, dense_of, lines, points
from bench.efficiency_runs.sweep import Done, Plan
from bench.efficiency_runs.training import EVERY, RANKS
from gradpilot.policies.gain import SKIP_EXPONENTS
from gradpilot.worker_agent.compressors.base import create

STATISTICS: Mapping[str, float] = {
    "gain": 1.0,
    "delay": -1.0,
    "drag": -1.0,
    "drag seen": -1.0,
    "error": -1.0,
    "error 10": -1.0,
    "error 30": -1.0,
    "turn": -1.0,
    "turn 10": -1.0,
    "turn 30": -1.0,
    "noise": -1.0,
    "noise 10": -1.0,
    "noise 30": -1.0,
    "residual": -1.0,
    "staleness": -1.0,
    "peak": -1.0,
    "burst": -1.0,
}
"""Statistics of a method, with the sign that efficiency should follow them by. ``snr`` belongs to
the task, not to the method."""

FORETOLD = "(1 + drag / c) ** -e"
"""The model whose statistic is known before an option is tried."""

SETS = {
    "all": "all methods",
    "waiting": "methods whose rest waits",
    "unchanged": "methods whose rest waits, at the rate of dense training",
}
"""Sets of methods, in words."""

MOST_ALARMS = 0.05
"""Share of false alarms that a guard may raise."""


@dataclass(frozen=True, slots=True)
class Findings:
    """All that follows from the trainings.

    Attributes:
        dense: Dense training by task.
        matched: Methods on tasks, each at the learning rate that suits it.
        unchanged: The same at the learning rate that suits dense training.
        sets: Points for models, by the names of ``SETS``.
        cases: Trainings that tell about divergence.
    """

    dense: Mapping[str, Dense]
    matched: Sequence[Line]
    unchanged: Sequence[Line]
    sets: Mapping[str, Points]
    cases: Sequence[divergence.Case]


def findings(done: Sequence[Done], plan: Plan) -> Findings:
    """Gather what follows from trainings."""
    seed, names = plan.seeds[0], tuple(STATISTICS)
    matched = lines(done, seed, plan.steps)
    unchanged = lines(done, seed, plan.steps, matched=False)
    sets = {
        "all": points(matched, names),
        "waiting": points([line for line in matched if line.method.waits], names),
        "unchanged": points([line for line in unchanged if line.method.waits], names),
    }
    dense = {task: dense_of(done, task, seed) for task in dict.fromkeys(d.task for d in done)}
    cases = divergence.cases(done, matched, seed, plan.steps)
    return Findings(dense, matched, unchanged, sets, cases)


def rows(found: Findings) -> list[dict[str, Any]]:
    """Return all rows."""
    parts = (
        _dense_rows(found),
        _method_rows(found, "matched", found.matched),
        _method_rows(found, "unchanged", found.unchanged),
        *(_statistic_rows(which, of) for which, of in found.sets.items()),
        *(_model_rows(which, of) for which, of in found.sets.items()),
        _exponent_rows("matched", found.matched),
        _exponent_rows("unchanged", found.unchanged),
        _divergence_rows(found.cases),
    )
    return [row for part in parts for row in part]


def _dense_rows(found: Findings) -> Iterable[dict[str, Any]]:
    for task, dense in found.dense.items():
        runs = dense.runs.values()
        yield {
            "kind": "dense",
            "task": task,
            "rate": dense.rate,
            "accuracy": _round(float(np.median([run.accuracy for run in runs]))),
            "loss": [_round(float(value)) for value in dense.curve],
            "snr": _round(dense.snr),
        }


def _method_rows(found: Findings, which: str, of: Sequence[Line]) -> Iterable[dict[str, Any]]:
    for line in of:
        yield {
            "kind": "method",
            "rates": which,
            "task": line.task,
            "method": line.method.name,
            "family": line.method.family,
            "rate": line.rate,
            "rate over dense": line.rate / found.dense[line.task].rate,
            "rates tried": list(line.rates),
            "efficiency": _round(line.efficiency),
            "efficiency by seed": [_round(e) for e in line.efficiencies.values()],
            "targets reached": _round(float(np.mean(list(line.reached.values())))),
            "accuracy": _round(float(np.median([r.accuracy for r in line.runs.values()]))),
            "diverged": sum(run.diverged for run in line.runs.values()),
            **{name: _round(line.statistic(name)) for name in STATISTICS},
        }


def _statistic_rows(which: str, of: Points) -> Iterable[dict[str, Any]]:
    for name, sign in STATISTICS.items():
        x, y = sign * of.statistics[name], of.efficiencies
        low, high = interval(x, y)
        row: dict[str, Any] = {"kind": "statistic", "methods": which, "statistic": name}
        row |= {"rank correlation": rank_correlation(x, y), "low": low, "high": high}
        for task in sorted(set(of.tasks)):
            inside = np.array([t == task for t in of.tasks])
            row[task] = rank_correlation(x[inside], y[inside])
        row["within families"] = within_families(of, name, sign)
        yield {key: _round(value) for key, value in row.items()}


def within_families(of: Points, name: str, sign: float) -> float:
    """Return the mean rank correlation over families on a task that have three members or more."""
    found = []
    for key in sorted(set(zip(of.tasks, of.families, strict=True))):
        own = np.array([k == key for k in zip(of.tasks, of.families, strict=True)])
        if own.sum() >= 3:
            found.append(rank_correlation(sign * of.statistics[name][own], of.efficiencies[own]))
    return float(np.mean(found)) if found else 0.0


def candidates() -> dict[str, models.Model]:
    """Return the models that are compared."""
    return {
        "dense for all": models.unity,
        "one efficiency for all": models.constant,
        "gain ** e": models.power("gain"),
        "gain ** e, by family": models.power_by_family("gain"),
        **{
            f"(1 + {name} / c) ** -e": models.saturating(name)
            for name in STATISTICS
            if name != "gain"
        },
        **{
            f"(1 + {name} / c) ** -e, e by family": models.saturating_by_family(name)
            for name in ("drag", "noise 10", "noise 30")
        },
    }


def _model_rows(which: str, of: Points) -> Iterable[dict[str, Any]]:
    for name, model in candidates().items():
        yield {
            "kind": "model",
            "methods": which,
            "model": name,
            "error where fitted": _round(models.error_within(model, of)),
            "error on the other task": _round(models.error_across(model, of)),
        }
    for name in STATISTICS:
        if name != "gain":
            c, e = models.saturation(of.statistics[name], np.log(of.efficiencies))
            row = {"kind": "constants", "methods": which, "statistic": name, "c": c, "e": e}
            yield {key: _round(value) for key, value in row.items()}


def in_use(family: str) -> float:
    """Return the exponent in use of a family; NaN if policies are not offered it."""
    name, _, form = family.partition(" ")
    if name == "skip":
        return SKIP_EXPONENTS.get(form, float("nan"))
    for method in METHODS:
        if method.family == family and not method.option.skip:
            compressor = create(method.option)
            if compressor.calibrated_for(RANKS):
                return compressor.efficiency_exponent
    return float("nan")


def _exponent_rows(which: str, of: Sequence[Line]) -> Iterable[dict[str, Any]]:
    everything = points(of, ("gain", "drag"))
    waiting = points([line for line in of if line.method.waits], ("gain", "drag"))
    c, _ = models.saturation(waiting.statistics["drag"], np.log(waiting.efficiencies))
    for family in dict.fromkeys(everything.families):
        own = everything.where([f == family for f in everything.families])
        fit = exponent(own.statistics["gain"], own.efficiencies)
        useful = own.where(own.efficiencies >= divergence.USEFUL)
        mild = exponent(useful.statistics["gain"], useful.efficiencies) if useful.tasks else None
        drag = float("nan")
        if family in waiting.families:
            drag = models.saturation_exponent(own.statistics["drag"], np.log(own.efficiencies), c)
        row = {
            "kind": "exponent",
            "rates": which,
            "family": family,
            "exponent": fit.exponent,
            "standard error": fit.error,
            "spread": fit.rms,
            "mean efficiency": fit.mean,
            "points": fit.points,
            "in use": in_use(family),
            "exponent where useful": mild.exponent if mild else None,
            "exponent of drag": drag,
        }
        yield {key: _round(value) for key, value in row.items()}


def _divergence_rows(of: Sequence[divergence.Case]) -> Iterable[dict[str, Any]]:
    bad = [case for case in of if case.diverged]
    if not bad or not any(case.useful for case in of):
        return
    for most in (1.0, MOST_ALARMS):
        for name, quantity in divergence.QUANTITIES.items():
            fit = divergence.fit(of, quantity, most)
            alarms, misses = divergence.across(of, quantity, most)
            leads = [divergence.lead(case, quantity, fit.at) for case in bad]
            leads = [steps for steps in leads if math.isfinite(steps)] or [math.nan]
            yield {
                "kind": "divergence",
                "quantity": name,
                "false alarms allowed": most,
                "threshold": _round(fit.at),
                "false alarms": _round(fit.alarms),
                "misses": _round(fit.misses),
                "false alarms on the other task": _round(alarms),
                "misses on the other task": _round(misses),
                "area": _round(fit.area),
                "steps ahead": _round(float(np.median(leads))),
                "diverged": fit.diverged,
                "useful": fit.others,
            }
    gain, above = divergence.safe_gain(of)
    yield {"kind": "safe gain", "gain": _round(gain), "trainings above": above}
    for case in bad:
        run = case.done.run
        yield {
            "kind": "diverged",
            "task": case.done.task,
            "method": case.done.method,
            "rate": case.done.rate,
            "seed": case.done.seed,
            "steps": len(run.residuals) * EVERY,
            **{n: _round(divergence.peak(case, q)) for n, q in divergence.QUANTITIES.items()},
        }


def verdicts(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what the rows say about what was asked."""
    return [*_ranking(table), *_exponents(table), *_guard(table)]


def _ranking(table: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for which, words in SETS.items():
        own = [r for r in table if r.get("methods") == which]
        ranks = {r["statistic"]: r["rank correlation"] for r in own if r["kind"] == "statistic"}
        best = max(ranks, key=lambda name: float(ranks[name]))
        yield results_file.verdict(
            f"{words}: rank correlation with efficiency of the best statistic, {best}",
            ">= 0.8",
            ranks[best],
            ranks[best] >= 0.8,
        )
        yield results_file.verdict(
            f"{words}: gain alone orders worse than {best}",
            f"< {ranks[best]}",
            ranks["gain"],
            ranks["gain"] < ranks[best],
        )
        fits = {r["model"]: r["error on the other task"] for r in own if r["kind"] == "model"}
        model = min(fits, key=lambda name: float(fits[name]))
        family = fits["gain ** e, by family"]
        for name in dict.fromkeys((model, FORETOLD)):
            yield results_file.verdict(
                f"{words}: error of log efficiency on a task not fitted to, {name}",
                f"< {family}, that of gain ** e by family",
                fits[name],
                fits[name] < family,
            )


def _exponents(table: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for row in table:
        if row["kind"] != "exponent" or row["in use"] is None or row["exponent"] is None:
            continue
        width = 2 * (row["standard error"] or 0.0)
        used = float(row["in use"])
        yield results_file.verdict(
            f"exponent of {row['family']} in use, rates {row['rates']}",
            f"{row['exponent']:.3f} +- {width:.3f}, twice the standard error of the fit",
            used,
            abs(used - row["exponent"]) <= width,
        )


def _guard(table: Sequence[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    for row in table:
        if row["kind"] != "divergence" or row["false alarms allowed"] != MOST_ALARMS:
            continue
        misses = row["misses on the other task"]
        if misses is not None:
            yield results_file.verdict(
                f"share of diverged trainings missed by {row['quantity']}, threshold of the other"
                f" task (false alarms {row['false alarms on the other task']:.1%})",
                "<= 0.1",
                misses,
                misses <= 0.1,
            )


def _round(value: Any) -> Any:
    """Return a float to four digits, None if it is no number; anything else as it is."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def text(table: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as tables for people, one for every kind."""
    out = []
    for kind in dict.fromkeys(row["kind"] for row in table):
        out.append(f"\n{kind}")
        own = [row for row in table if row["kind"] == kind]
        out += ["  " + "  ".join(f"{k}={_short(v)}" for k, v in row.items() if k != "kind")
                for row in own]  # fmt: skip
    return "\n".join(out)


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + " ".join(_short(v) for v in value) + "]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)

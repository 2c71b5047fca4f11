"""Decisions: all policies on simulated networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.report.results import Result, Row, table
from bench.report.section import Section, from_verdicts

TEXT = """
How much time does `adaptive` lose to one who knows the network, and what do other policies make
of the same networks? All run in the simulator ([simulator.md](simulator.md)): {kinds} kinds of
traces, {models} models, costs of gloo for N = {small} and of NCCL for {large}. The full matrix
has 60 traces (`--traces 60`); run were {traces}, each with all models and N: {cases} cases. With
{largest} ranks, of the policies only `adaptive` was run. *Regret* is time over that of the
oracle, less 1; the oracle keeps the gain floor, so below it a policy may be "faster".

Over N = {everyone}:

{policies}

`adaptive` alone, by number of ranks, model and kind of trace:

{adaptive}

Traces begin anew with every job of about 2000 dense steps, so the start and the warm-up are in
all of it.

**What the simulator found, and what became of it.** `adaptive` went to and fro between two plans
where latency of buckets in flight was not seen; it left plans just below the gain floor again and
again; and where steps take seconds, the first plan came minutes late. All three are mended, and
are tests now.

{targets}

- *Worst regret and constant networks.* The worst case is {worst_model} with {worst_ranks} ranks
  on a trace of kind {worst_kind}. Where looks are far apart, the warm-up, which keeps the gain
  above `warm_floor` for three calm ones, is a good part of a job. On constant networks the cases
  that lose most are those with many plans that are nearly equal: gains drift in training, and
  what is not in use is only predicted. A plan that falls below the gain floor is left, and often
  for one that turns out worse. Critical phases, which a drift of the gain by a tenth sets off,
  cost most where they come. These are guards, and the recorded gains (100 steps, stretched over
  the job) may drift more than real ones.
- *Answers to a change.* {quick} of {answers} came within two decision periods, the slowest after
  {slowest}. Why the others took longer was not looked into one by one; what jumped must be seen
  twice, and a plan that was left lately must wait.
- *The best rival by time* is below the floor in {rival_below} of its steps. Efficiency as a power
  of gain is too kind to such gains, so times of policies that are mostly below the floor are no
  estimate of a training that works, and times are comparable only between rows with few steps
  below the floor. `flexible` may choose the tree, too, as in its paper.
- *Steps below the floor* of `adaptive` are below it by up to `gain_band` on purpose, or were
  predicted above it; such a plan is left after the dwell time.
- *Fewer decisions than in production.* To be affordable, decisions are thinned out to two in 50
  typical steps, after 150 s at the latest. Guards count looks, so warm-up, critical phases and
  what must be seen twice take longer here than with a decision every 5 s.
- *In sample.* The power by which the gain of a bare gradient is lowered (`policies/gain.py`) was
  found on the recordings that the simulator plays back. Elsewhere it is a guess until a plan has
  been measured.
"""

SHARED = 64
"""Most ranks with which all policies were run."""


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    rows = [row for row in result.document["rows"] if "policy" in row]
    ours = [row for row in rows if row["policy"] == "adaptive"]
    ranks = sorted({row["ranks"] for row in rows})
    answers = [row["periods"] for row in result.rows(kind="reaction")]
    worst = max(ours, key=lambda row: row["worst_regret"])
    groups = [
        *((f"N = {n}", [row for row in ours if row["ranks"] == n]) for n in ranks),
        *((name, [r for r in ours if r["model"] == name]) for name in _names(ours, "model")),
        *((name, [r for r in ours if r["kind"] == name]) for name in _names(ours, "kind")),
    ]
    everybody = [row for row in rows if row["ranks"] <= SHARED]
    policies = [
        (name, [row for row in everybody if row["policy"] == name])
        for name in _names(everybody, "policy")
    ]
    cases = sum(row["traces"] for row in ours)
    rival = _rival(result)
    return {
        "kinds": f"{len(_names(ours, 'kind'))}",
        "models": f"{len(_names(ours, 'model'))}",
        "small": " and ".join(str(n) for n in ranks if n < SHARED),
        "large": " and ".join(str(n) for n in ranks if n >= SHARED),
        "largest": f"{ranks[-1]}",
        "traces": f"{cases // len(ranks) // len(_names(ours, 'model'))}",
        "cases": f"{cases}",
        "everyone": ", ".join(str(n) for n in ranks if n <= SHARED),
        "policies": _table("policy", policies),
        "adaptive": _table("", groups),
        "worst_model": worst["model"],
        "worst_ranks": f"{worst['ranks']}",
        "worst_kind": f"`{worst['kind']}`",
        "quick": f"{sum(periods <= 2.0 for periods in answers)}",
        "answers": f"{len(answers)}",
        "slowest": f"{max(answers):.1f}",
        "rival_below": _percent(_mean(dict(policies)[rival], "mean_below_floor")),
    }


def words(result: Result) -> Mapping[str, bool]:
    """Return what the text says in words, and whether it is so."""
    worst = result.verdict("^adaptive, worst regret")
    return {"*Worst regret and constant networks.*": not worst["holds"]}


def _names(rows: Sequence[Row], field: str) -> list[str]:
    return list(dict.fromkeys(row[field] for row in rows))


def _rival(result: Result) -> str:
    return str(result.verdict("best rival")["name"].split(",")[0])


def _mean(rows: Sequence[Row], field: str) -> float:
    """Return a mean over traces; a row is the mean over its own."""
    return float(math.fsum(r[field] * r["traces"] for r in rows) / sum(r["traces"] for r in rows))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 10 else f"{100 * share:.0f} %"


def _table(what: str, groups: Sequence[tuple[str, Sequence[Row]]]) -> str:
    return table(
        (what, "mean regret", "worst", "switches", "steps below the floor"),
        [
            (
                name,
                _percent(_mean(rows, "mean_regret")),
                _percent(max(row["worst_regret"] for row in rows)),
                f"{_mean(rows, 'mean_switches'):.1f}",
                _percent(_mean(rows, "mean_below_floor")),
            )
            for name, rows in groups
        ],
    )


SECTION = Section(
    position=50,
    title="Decisions",
    result="decisions",
    text=TEXT,
    places=places,
    given={
        "1": "part of a definition",
        "60": "traces of the full matrix",
        "2000": "setting of the simulator's jobs",
        "100": "recorded steps",
        "50": "setting of the benchmark",
        "150": "setting of the benchmark",
        "5": "the controller's default",
    },
    reasons={
        "worst regret|worst constant": "warm-up, drifting gains, guards: see below",
        "best rival": "the rival stays below the gain floor, which `adaptive` keeps: see below",
        "decision periods to answer": "see below, answers to a change",
    },
    words=words,
    headlines=from_verdicts("^adaptive, mean regret", "^adaptive, worst regret"),
)

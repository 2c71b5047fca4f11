"""Statistical efficiency: how many more steps compression costs, and what foretells it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.report.results import Result, Row, table
from bench.report.section import Section

TEXT = """
How many more steps does compression cost? Two tasks are trained on 4 virtual ranks with {methods}
methods: all compressors that lose something, at settings of their ladders, and skipped ring
steps. *Images* is a CNN of 19,000 parameters on Fashion-MNIST, *text* foretells the next
character of Python's own reference (25,000 parameters). SGD with momentum 0.9, 260 steps, one
bucket, error feedback as in the product. Each method gets the learning rate that suits it best on
held-out samples, searched by factors of 2 with one seed, then {seeds} seeds.

The **efficiency** of a method is the steps that dense training with the same seed needs to a test
loss, over the steps that the method needs; geometric mean of three losses, which dense training
has after 65, 104 and 156 steps. Where a method does not get there, the loss that it did reach
takes their place. Quantizers that lose next to nothing (`thc`, `int8`, `qsgd`, `natural`) end at
{quantized} in the median, single seeds between {quantized_seeds}: that is the noise of the
measurement.

{efficiencies}

At matched rates the two divisors are the same method; at a rate left as it was, the one that
leaves out shrinks the step and so keeps what the other loses. The last column has two seeds where
the rate differs.

**Which statistic foretells it.** Spearman's rank correlation with efficiency over both tasks,
with its 90 % bootstrap interval, and the error (root mean square, in log efficiency) of a model
fitted to one task on the other. *Waiting* are methods that leave something out and send it later.

{statistics}

On one task, gain orders waiting methods well ({gain_images} and {gain_text}), but the same gain
costs more where there is more signal: top-k of 1 % keeps a gain of {topk_gain_images} on images
and {topk_gain_text} on text, and is worth {topk_images} and {topk_text} of a step. What counts is
how large the error is beside the noise that the mean of N samples has anyway. `noise 10` measures
that, but needs the true mean. `drag` (derived here) foretells it: with `d = 1/gain - 1`, which is
the residual ratio and the number of steps that a gradient waits, the noise that waits adds up to
d and the signal, being the same in every step, to its square:

    drag = d (1 + N SNR d)        efficiency = (1 + drag / c)^-e

with `SNR = ||mu||^2 / s^2` of one rank's gradient, as measured in dense training ({snr_images}
and {snr_text} here). For waiting methods over both tasks c = {c} and e = {e} fit with an error of
{drag_error}; at dense training's rate {c_unchanged} and {e_unchanged}, with
{drag_error_unchanged}. It is too strict with PowerSGD, whose directions are those of the mean,
and too kind to random-k.

**Exponents of gain by family**, for `gain ** e`, with twice the standard error; *useful* is
fitted where a step is worth a third or more:

{exponents}

In use are those at dense training's rate, since nobody changes the rate when a plan does. One
exponent cannot serve both a mild and a strong ratio, as the columns show: efficiency stays near 1
as long as d is small and falls faster later, which the drag model does. It is not in use yet: its
constants at an unchanged rate fit loosely, and its form waits for a task that had no part in
finding it.

**Divergence.** {diverged} trainings diverged at a rate that dense training bears (a step of it
still worth a third of one at its best rate). Against {useful} trainings whose steps are worth a
third or more, thresholds that at most {alarms} of these exceed:

{divergence}

The options' quantities belong to the option, measured on the same task at the rate that suits it,
so they warn beforehand; the others are watched in the training: the residual passes its threshold
{residual_ahead} steps before the loss shows the harm (median), the gradient {gradient_ahead}.
Nothing diverged above a gain of {safe_gain}, in {safe_trainings} trainings. All diverged ones are
in the file, with their quantities.

How far to trust this: {candidates} statistics were compared and the best is named, so its lead is
a little flattered; the form of `drag`, and what counts as useful, were found while looking at
these trainings, so they wait for a task that had no part in it. The other task judges constants
and thresholds, not the choice of the form. What this cannot say: 4 ranks only (how drag grows
with N is derived, not measured), small models, SGD with momentum and no adaptive optimizer, one
bucket, 260 steps from the start. On buckets this small `mstopk` and `dgc` select nearly what
`topk` does, so their points count it three times.

{targets}
"""

METHODS: Sequence[tuple[str, Sequence[str]]] = (
    ("topk 10 %, 1 %, 0.1 %", ("topk 0.1", "topk 0.01", "topk 0.001")),
    ("artopk star 10 %, 1 %, 0.1 %", ("artopk star 0.1", "artopk star 0.01", "artopk star 0.001")),
    ("topkc 30 %, 10 %, 3 %", ("topkc 0.3", "topkc 0.1", "topkc 0.03")),
    ("randomk 30 %, 10 %", ("randomk feedback 0.3", "randomk feedback 0.1")),
    ("powersgd rank 4, 1", ("powersgd full rank 4", "powersgd full rank 1")),
    ("onebit, efsignsgd, signsgd", ("onebit", "efsignsgd", "signsgd")),
    (
        "skip 1, 2, 3 of 4 ranks, divisor N",
        tuple(f"skip {n} of 4, divisor skip" for n in (1, 2, 3)),
    ),
    ("the same, divisor N - S", tuple(f"skip {n} of 4, divisor drop" for n in (1, 2, 3))),
)

STATISTICS = (
    ("gain, one exponent for each family", "gain", "gain ** e, by family"),
    ("error to the mean gradient (vNMSE)", "error", ""),
    ("the same, of updates added up over 10 steps", "error 10", ""),
    ("that error in units of the sampling noise, `noise 10`", "noise 10", ""),
    ("residual over gradient", "residual", ""),
    ("steps of mean gradient that wait", "staleness", ""),
    ("`drag`, from the gain and the SNR", "drag", ""),
    ("`drag seen`, from the residual and the SNR", "drag seen", ""),
)

SHOWN = ("topkc", "chunkunion", "lwtopk", "sidco", "powersgd full", "randomk feedback")
"""Families shown beside those whose exponents are in use."""

QUANTIZERS = ("thc", "int8", "qsgd", "natural")
ALARMS = 0.05


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    lines = result.rows(kind="method", rates="matched")
    quantized = [row for row in lines if row["family"] in QUANTIZERS]
    medians = [row["efficiency"] for row in quantized]
    seeds = [value for row in quantized for value in row["efficiency by seed"]]
    gain = result.row(kind="statistic", methods="waiting", statistic="gain")
    guards = {row["quantity"]: row for row in _guards(result)}
    safe, any_guard = result.row(kind="safe gain"), next(iter(guards.values()))
    found = {
        "methods": f"{len({row['method'] for row in lines})}",
        "seeds": f"{len(result.document['seeds'])}",
        "quantized": f"{min(medians):.2f} to {max(medians):.2f}",
        "quantized_seeds": f"{min(seeds):.2f} and {max(seeds):.2f}",
        "efficiencies": _efficiencies(result),
        "statistics": _statistics(result),
        "gain_images": f"{gain['images']:.2f}",
        "gain_text": f"{gain['text']:.2f}",
        "exponents": _exponents(result),
        "divergence": _divergence(guards),
        "diverged": f"{any_guard['diverged']}",
        "useful": f"{any_guard['useful']}",
        "alarms": f"{100 * ALARMS:.0f} %",
        "residual_ahead": f"{guards['residual over gradient']['steps ahead']:.0f}",
        "gradient_ahead": f"{guards['gradient over dense gradient']['steps ahead']:.0f}",
        "safe_gain": f"{safe['gain']:.2f}",
        "safe_trainings": f"{safe['trainings above']}",
        "candidates": f"{len({row['statistic'] for row in result.rows(kind='statistic')})}",
    }
    for task in ("images", "text"):
        topk = _method(result, "matched", task, "topk 0.01")
        found[f"topk_gain_{task}"] = f"{topk['gain']:.2f}"
        found[f"topk_{task}"] = f"{topk['efficiency']:.2f}"
        found[f"snr_{task}"] = f"{result.row(kind='dense', task=task)['snr']:.2g}"
    for methods, end in (("waiting", ""), ("unchanged", "_unchanged")):
        constants = result.row(kind="constants", methods=methods, statistic="drag")
        model = result.row(kind="model", methods=methods, model="(1 + drag / c) ** -e")
        found[f"c{end}"], found[f"e{end}"] = (f"{constants[name]:.2f}" for name in ("c", "e"))
        found[f"drag_error{end}"] = f"{model['error where fitted']:.2f}"
    return found


def words(result: Result) -> Mapping[str, bool]:
    """Return what the text says in words, and whether it is so."""
    best = result.verdict("^methods whose rest waits: rank correlation")["name"]
    return {"What counts is how large the error is beside the noise": "noise" in best}


def _method(result: Result, rates: str, task: str, method: str) -> Row:
    return result.row(kind="method", rates=rates, task=task, method=method)


def _efficiencies(result: Result) -> str:
    def listed(rates: str, task: str, methods: Sequence[str]) -> str:
        rows = [_method(result, rates, task, method) for method in methods]
        return ", ".join(f"{row['efficiency']:.2f}" for row in rows)

    cells = [
        (
            words,
            listed("matched", "images", methods),
            listed("matched", "text", methods),
            f"{listed('unchanged', 'images', methods)}; {listed('unchanged', 'text', methods)}",
        )
        for words, methods in METHODS
    ]
    return table(("method", "images", "text", "the same at dense training's rate"), cells)


def _statistics(result: Result) -> str:
    def correlation(methods: str, statistic: str) -> str:
        row = result.row(kind="statistic", methods=methods, statistic=statistic)
        return f"{row['rank correlation']:.2f} ({row['low']:.2f} to {row['high']:.2f})"

    cells = []
    for words, statistic, model in STATISTICS:
        name = model or f"(1 + {statistic} / c) ** -e"
        error = result.row(kind="model", methods="waiting", model=name)["error on the other task"]
        every, waiting = correlation("all", statistic), correlation("waiting", statistic)
        cells.append((words, every, waiting, f"{error:.2f}"))
    return table(("statistic", "all methods", "waiting", "error, waiting"), cells)


def _exponents(result: Result) -> str:
    cells = []
    for row in result.rows(kind="exponent", rates="matched"):
        if row["in use"] is None and row["family"] not in SHOWN:
            continue
        other = result.row(kind="exponent", rates="unchanged", family=row["family"])
        in_use = "" if row["in use"] is None else f"{row['in use']:.2f}"
        useful = row["exponent where useful"]
        cells.append(
            (
                row["family"],
                in_use,
                _exponent(row),
                f"{useful:.2f}" if useful else "",
                _exponent(other),
            )
        )
    head = ("family", "in use", "fitted, matched rate", "useful", "at dense training's rate")
    return table(head, cells)


def _exponent(row: Row) -> str:
    error = row["standard error"]
    spread = "" if error is None else f" +- {2 * error:.2f}"
    return "" if row["exponent"] is None else f"{row['exponent']:.2f}{spread}"


def _guards(result: Result) -> list[Row]:
    rows = result.rows(kind="divergence")
    return [row for row in rows if row["false alarms allowed"] == ALARMS]


def _divergence(guards: Mapping[str, Row]) -> str:
    def percent(share: float) -> str:
        return f"{100 * share:.1f} %"

    cells = [
        (
            quantity,
            f"{row['threshold']:.3g}",
            percent(row["false alarms"]),
            percent(row["misses"]),
            ", ".join(
                percent(row[f"{what} on the other task"]) for what in ("false alarms", "misses")
            ),
        )
        for quantity, row in guards.items()
    ]
    other = "both, with the threshold of the other task"
    return table(("quantity", "threshold", "false alarms", "misses", other), cells)


SECTION = Section(
    position=40,
    title="Statistical efficiency",
    result="efficiency",
    text=TEXT,
    places=places,
    given={
        "4": "virtual ranks",
        "19,000": "parameters of the model",
        "25,000": "parameters of the model",
        "0.9": "momentum",
        "260": "steps",
        "2": "factor of the search",
        "65": "steps of dense training that define a target",
        "104": "steps of dense training that define a target",
        "156": "steps of dense training that define a target",
        "90": "width of the interval, %",
        "1": "ratio of a compressor; efficiency of a dense step",
    },
    reasons={
        "exponent of .* rates matched": "those in use are of an unchanged rate, see above",
        "^share of diverged": "no single quantity that is known without the true mean tells all;"
        " what drag misses are random selections, and chunks at twice the rate",
    },
    words=words,
)

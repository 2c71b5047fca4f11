"""The HTML report: one file that needs nothing else, for light and dark screens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gradpilot.demo import charts
from gradpilot.demo.result import Runs
from gradpilot.demo.table import link_text

BANNER = (
    "The link is emulated: after every collective over loopback each rank waits as long as the"
    " alpha-beta cost model says the transfer would have taken. Data, gradients, collectives,"
    " decisions and clocks are real."
)

_STYLE = """
:root { color-scheme: light dark; --bg:#ffffff; --fg:#1f2430; --soft:#5b6475; --line:#d9dee7;
 --card:#f6f8fb; --adaptive:#1d5fd1; --baseline:#c2660a; --truth:#5b6475; --warn:#fff4d6;
 --warnfg:#6b4a00; --good:#1a7f4b; --bad:#c0322b; --phase0:#eef2f8; --phase1:#e0e7f2;
 --plan0:#c2660a; --plan1:#1d5fd1; --plan2:#0f8b8d; --plan3:#7a4fc4; --plan4:#b23a6d;
 --plan5:#5c7c1f; }
@media (prefers-color-scheme: dark) { :root { --bg:#14171d; --fg:#e6e9ef; --soft:#9aa4b5;
 --line:#333a47; --card:#1b2029; --adaptive:#6ea8ff; --baseline:#f0a04b; --truth:#9aa4b5;
 --warn:#3a2f10; --warnfg:#f5d98a; --good:#5fd08f; --bad:#ff8078; --phase0:#1d222c;
 --phase1:#262d3a; --plan0:#f0a04b; --plan1:#6ea8ff; --plan2:#4fc3c5; --plan3:#b394f4;
 --plan4:#ee86b2; --plan5:#a5cb5c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 960px; padding: 24px 20px 60px; background: var(--bg);
 color: var(--fg); font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 34px 0 6px; }
p { margin: 6px 0; } .soft { color: var(--soft); }
.banner { background: var(--warn); color: var(--warnfg); border-radius: 8px; padding: 10px 14px;
 margin: 14px 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px;
 margin: 16px 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
 padding: 10px 12px; }
.card b { display: block; font-size: 21px; line-height: 1.3; }
.card span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; vertical-align: top; padding: 6px 10px 6px 0;
 border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } td.n { white-space: nowrap; }
td.n, th.n { font-variant-numeric: tabular-nums; }
.yes { color: var(--good); font-weight: 600; } .no { color: var(--bad); font-weight: 600; }
.fronts { display: grid; grid-template-columns: repeat(auto-fit, minmax(360px, 1fr)); gap: 14px; }
figure { margin: 8px 0; } figcaption { font-size: 13px; color: var(--soft); }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--fg); font-family: inherit; }
svg .tick { font-size: 11.5px; fill: var(--soft); } svg .label { font-size: 12px; }
svg .phase { font-size: 11.5px; fill: var(--soft); }
svg .grid { stroke: var(--line); fill: none; stroke-width: .7; }
svg .axis { stroke: var(--soft); fill: none; }
svg .phase0 { fill: var(--phase0); } svg .phase1 { fill: var(--phase1); }
svg polyline.adaptive { stroke: var(--adaptive); fill: none; stroke-width: 1.5; }
svg polyline.baseline { stroke: var(--baseline); fill: none; stroke-width: 1.5; }
svg polyline.truth { stroke: var(--truth); fill: none; stroke-width: 2; stroke-dasharray: 6 4; }
svg circle.adaptive { fill: var(--adaptive); } svg circle.baseline { fill: var(--baseline); }
svg circle.estimate { fill: var(--adaptive); fill-opacity: .75; }
svg circle.gather { fill: var(--plan2); } svg circle.reduce { fill: var(--plan0); }
svg circle.current { fill: none; stroke: var(--soft); stroke-width: 2; }
svg circle.chosen { fill: none; stroke: var(--bad); stroke-width: 2.5; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin: 0 4px 0 10px; }
"""


def write_report(path: Path, runs: Runs, result: Mapping[str, Any]) -> None:
    """Write the report; its folder is made if need be.

    Raises:
        OSError: It cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(runs, result), encoding="utf-8")


def render(runs: Runs, result: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        runs: What was recorded.
        result: What ``result.build`` made of it.
    """
    sections = [
        f"<h1>gradpilot demo</h1><p class='soft'>{result['world_size']} ranks over gloo,"
        f" {escape(result['dataset'])}, {result['steps']} steps, seed {result['seed']}</p>",
        f"<div class='banner' role='note'>{escape(BANNER)}</div>",
        _cards(result),
        "<h2>Claims</h2>",
        _claims(result["claims"]),
        "<h2>Step time</h2>",
        _figure(charts.step_times(runs), "Every step of both runs; the phases are shaded."),
        "<h2>Accuracy</h2>",
        _figure(
            charts.accuracies(runs),
            "Same model, data and order of batches; starting and evaluation do not count."
            f" Accuracies more than {100 * charts.SHOWN:g} points below the best are not drawn.",
        ),
        "<h2>Link</h2>",
        _figure(
            charts.links(runs),
            "What decisions took the link for. The loopback transfer comes on top of the emulated"
            " time and shows where the emulated link is fast; what hardly matters at a time, such"
            " as bandwidth while latency dominates, is known less well.",
        ),
        "<h2>Plans</h2>",
        _figure(charts.plans(runs), "What the ranks carried out, all on the same step."),
        "<h2>Phases</h2>",
        _phases(result["phases"]),
        "<h2>Why each switch happened</h2>",
        _decisions(result["decisions"]),
        "<h2>Pareto fronts</h2>",
        "<p class='soft'>Candidates that nothing beats in statistical loss, compression time and"
        " time on the wire. <span class='key' style='background:var(--plan2)'></span>all-gather"
        "<span class='key' style='background:var(--plan0)'></span>all-reduce; the red ring is what"
        " was chosen, the grey one what was in force. Chosen is what has the least predicted time"
        " per unit of progress.</p>",
        _fronts(runs),
    ]
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'/>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'/>"
        f"<title>gradpilot demo (emulated link)</title><style>{_STYLE}</style></head><body>"
        + "\n".join(sections)
        + "</body></html>\n"
    )


def _cards(result: Mapping[str, Any]) -> str:
    change = result["seconds"] / result["baseline_seconds"] - 1
    cards = (
        (f"{result['seconds']:.1f} s", "training time with gradpilot"),
        (f"{result['baseline_seconds']:.1f} s", "with static bf16"),
        (f"{100 * change:+.0f} %", "training time against static bf16"),
        (f"{100 * result['final_accuracy']:.2f} %", "final accuracy"),
        (f"{100 * result['baseline_accuracy']:.2f} %", "with static bf16"),
        (str(result["switches"]), "plan switches"),
    )
    items = (f"<div class='card'><b>{big}</b><span>{small}</span></div>" for big, small in cards)
    return f"<div class='cards'>{''.join(items)}</div>"


def _claims(claims: Sequence[Mapping[str, Any]]) -> str:
    rows = (
        (
            escape(c["name"]),
            escape(c["target"]),
            escape(str(c["measured"])),
            "<span class='yes'>holds</span>" if c["holds"] else "<span class='no'>fails</span>",
        )
        for c in claims
    )
    return _table(("claim", "target", "measured", ""), rows)


def _phases(phases: Sequence[Mapping[str, Any]]) -> str:
    def row(p: Mapping[str, Any]) -> tuple[str, ...]:
        estimate, reaction = p["estimate"], p["steps_to_first_switch"]
        rate = estimate["bits_per_second"] if estimate else None
        seen = link_text(estimate["latency_seconds"], 8 / rate if rate else 0) if estimate else "-"
        return (
            escape(p["name"]),
            f"{p['first_step']} to {p['last_step']}",
            link_text(p["latency_seconds"], 8 / p["bits_per_second"]),
            seen,
            escape(" + ".join(p["options"])),
            "-" if reaction is None else str(reaction),
            f"{1e3 * p['step_seconds']:.0f}",
            f"{1e3 * p['baseline_step_seconds']:.0f}",
        )

    head = (
        *("phase", "steps", "emulated link", "last estimate", "plan at the end"),
        *("steps to first switch", "ms a step, settled", "the same, bf16"),
    )
    return _table(head, (row(p) for p in phases))


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> str:
    rows = (
        (
            str(d["step"]),
            "-" if d["in_force_from"] is None else str(d["in_force_from"]),
            escape(d["phase"]),
            escape(" + ".join(d["options"])),
            escape(d["reason"]),
        )
        for d in decisions
    )
    return _table(("decided at step", "in force from", "phase", "plan", "reason"), rows)


def _fronts(runs: Runs) -> str:
    figures = (
        _figure(
            charts.front(decision),
            f"Step {decision.step}, {runs.settings.schedule.at(decision.step).name}:"
            f" {' + '.join(o.label for o in decision.plan.options())}",
        )
        for decision, _ in runs.decisions
        if decision.outcome == "switch" and decision.plan is not None and decision.front
    )
    return f"<div class='fronts'>{''.join(figures)}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are HTML already."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<div class='scroll'><table><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _figure(chart: str, caption: str) -> str:
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"

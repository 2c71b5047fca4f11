"""Write the Grafana dashboard: ``python deploy/grafana/dashboard.py``.

What is shown stands here, how Grafana wants it written in ``panels``. The result is committed as
JSON next to this file; a test regenerates it and compares. Every query is run against a real
Prometheus by ``tests/deploy/test_prometheus.py``, and every metric in it is one that the controller
registers.

Written for Grafana 11.6 (schema version 41); newer versions migrate it by themselves. Another
Prometheus data source than the provisioned one: ``--datasource UID --output FILE``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from panels import (
    DATASOURCE,
    RUN,
    WIDTH,
    Json,
    graph,
    place,
    row,
    stat,
    table,
    target,
    timeline,
    variable,
)

OUTPUT = Path(__file__).parent / "dashboards" / "gradpilot.json"

SELECT = '{run=~"$run", model=~"$model"}'
"""What both drop-down lists select."""

PLAN = f"max by (run, model, compressor, collective) (gradpilot_plan_info{SELECT})"
"""Query with one series for each plan in force."""


def by_run(metric: str) -> str:
    """Return the query for a gauge of the selected runs; a restarted controller counts once."""
    return f"max by (run, model) ({metric}{SELECT})"


def rate_by_run(metric: str) -> str:
    """Return the query for a counter's growth per second in the selected runs."""
    return f"sum by (run, model) (rate({metric}{SELECT}[$__rate_interval]))"


def growth(metric: str, labels: str, select: str = "") -> str:
    """Return the query for a counter's growth over one drawn point."""
    return f"sum by ({labels}) (increase({metric}{select}[$__rate_interval]))"


def panels() -> list[Json]:
    """Return all panels in reading order."""
    return [
        row("Now"),
        stat(
            "Controller",
            "Whether Prometheus reaches the controller.",
            'max(up{job="gradpilot"})',
            text={0: "down", 1: "up"},
            good=1,
        ),
        stat(
            "Version",
            "Version of the controller.",
            "max by (version) (gradpilot_build_info)",
            "{{version}}",
            name=True,
        ),
        stat("Runs", "Runs and models that the controller knows.", "max(gradpilot_runs)"),
        stat("Sessions", "Open streams from agents, one a rank.", "max(gradpilot_sessions)"),
        stat(
            "Term",
            "Grows by one at each start of the controller; agents refuse plans of an older term.",
            "max(gradpilot_term)",
        ),
        stat(
            "Frozen",
            "Runs that get no new plan because an operator froze them.",
            f"sum(max by (run, model) (gradpilot_frozen{SELECT}))",
            bad=1,
        ),
        table(
            "Plan in force",
            "What each run does with its gradients. A plan with several options, one per bucket,"
            " shows its largest.",
            {
                "Plan": PLAN,
                "Id": by_run("gradpilot_plan_id"),
                "Kept ratio": by_run("gradpilot_plan_kept_ratio"),
                "Skipped steps": by_run("gradpilot_plan_skip_steps"),
                "Ranks": by_run("gradpilot_ranks"),
                "World size": by_run("gradpilot_world_size"),
                "Step": by_run("gradpilot_step"),
                "Frozen": by_run("gradpilot_frozen"),
                "Pinned": by_run("gradpilot_pinned"),
                "Emulated link": by_run("gradpilot_emulated"),
            },
            hidden=["Value #A"],
            width=WIDTH,
        ),
        row("Step time"),
        graph(
            "Step time, measured and predicted",
            "Median time of a step, and what the controller predicted for the plan in force.",
            target(by_run("gradpilot_step_seconds"), f"{RUN} measured"),
            target(by_run("gradpilot_predicted_step_seconds"), f"{RUN} predicted"),
            unit="s",
            width=6,
        ),
        graph(
            "Prediction error",
            "How far step times were from those that the decision before had predicted, as a share:"
            " nine of ten looks of 15 minutes were no further off than p90; by compressor the"
            " median of the newest looks; now, for the plan in force.",
            target(
                "histogram_quantile(0.9, sum by (le, run, model) (rate("
                f"gradpilot_step_prediction_error_ratio_bucket{SELECT}[15m])))",
                f"{RUN} p90",
            ),
            target(
                "max by (run, model, compressor)"
                f" (gradpilot_recent_prediction_error_ratio{SELECT})",
                f"{RUN} {{{{compressor}}}}",
            ),
            target(f"abs({by_run('gradpilot_step_prediction_ratio')} - 1)", f"{RUN} now"),
            unit="percentunit",
            width=6,
        ),
        graph(
            "Compute and exposed communication",
            "A step is compute, which no plan changes, and the communication that sticks out"
            " behind it. With a high share of compute there is nothing to win.",
            target(by_run("gradpilot_compute_seconds"), f"{RUN} compute"),
            target(by_run("gradpilot_exposed_seconds"), f"{RUN} exposed"),
            unit="s",
            stack=True,
            width=6,
        ),
        graph(
            "Compression, synchronisation and straggling",
            "Work of the compressor, time on the wire, and waiting for the slowest rank in one"
            " step. They overlap with compute, so their sum is not the step time.",
            target(by_run("gradpilot_compression_seconds"), f"{RUN} compression"),
            target(by_run("gradpilot_synchronisation_seconds"), f"{RUN} synchronisation"),
            target(by_run("gradpilot_straggle_seconds"), f"{RUN} straggling"),
            unit="s",
            width=6,
        ),
        row("Link"),
        graph(
            "Link latency",
            "One-way latency of a message, fitted from the job's own collectives.",
            target(by_run("gradpilot_link_latency_seconds")),
            unit="s",
        ),
        graph(
            "Link bandwidth",
            "Bytes a second of one hop, fitted from the job's own collectives.",
            target(by_run("gradpilot_link_bandwidth_bytes_per_second")),
            unit="Bps",
        ),
        graph(
            "Age of the link estimate",
            "Time since the newest collective that the estimate used.",
            target(by_run("gradpilot_link_age_seconds")),
            unit="s",
        ),
        row("Plan"),
        timeline(
            "Compressor and collective",
            "Which plan was in force when.",
            target(
                PLAN,
                f"{RUN}: {{{{compressor}}}} {{{{collective}}}}",
            ),
            width=WIDTH,
        ),
        graph(
            "Kept ratio",
            "Share of gradient elements that the plan keeps; small means strong compression.",
            target(by_run("gradpilot_plan_kept_ratio")),
            unit="percentunit",
            log=True,
            steps=True,
        ),
        graph(
            "Skipped ring steps",
            "Reduce-scatter steps that the plan leaves out of each ring all-reduce.",
            target(by_run("gradpilot_plan_skip_steps")),
            unit="none",
            steps=True,
        ),
        graph(
            "Gain and wire ratio",
            "Gain: share of the gradient's squared norm that was sent. Wire ratio: bytes sent to"
            " bytes of the dense fp32 gradient.",
            target(by_run("gradpilot_gain_ratio"), f"{RUN} gain"),
            target(by_run("gradpilot_wire_ratio"), f"{RUN} wire"),
            unit="percentunit",
        ),
        graph(
            "Bytes sent and saved",
            "Bytes a second handed to collectives, beside those of the dense fp32 gradient.",
            target(rate_by_run("gradpilot_wire_bytes_total"), f"{RUN} sent"),
            target(rate_by_run("gradpilot_dense_bytes_total"), f"{RUN} dense"),
            unit="Bps",
            width=12,
        ),
        graph(
            "Loss",
            "Newest loss given to handle.observe; empty for runs that give none.",
            target(by_run("gradpilot_loss")),
            unit="none",
            width=12,
        ),
        row("Decisions"),
        graph(
            "Decisions by outcome",
            "What the controller decided per drawn point, and probes of the link that it did not"
            " ask for again while one was under way.",
            target(growth("gradpilot_decisions_total", "outcome", SELECT), "{{outcome}}"),
            target(
                growth("gradpilot_probe_repeats_total", "run, model", SELECT), f"{RUN} no probe"
            ),
            unit="none",
            bars=True,
            stack=True,
            width=6,
        ),
        graph(
            "Switches",
            "Plans that all ranks switched to and, by reason, those that a guard undid, per drawn"
            " point; options that are black-listed now.",
            target(growth("gradpilot_switches_total", "run, model", SELECT)),
            target(growth("gradpilot_plans_undone_total", "reason", SELECT), "undone: {{reason}}"),
            target(by_run("gradpilot_blacklisted_options"), f"{RUN} black-listed"),
            unit="none",
            bars=True,
            width=6,
        ),
        graph(
            "Front size",
            "Points of the Pareto set of the newest decision.",
            target(by_run("gradpilot_front_size")),
            unit="none",
            steps=True,
            width=6,
        ),
        graph(
            "Decision latency",
            "Time that a decision takes in the controller; training never waits for it.",
            *(
                target(
                    f"histogram_quantile({q}, sum by (le)"
                    f" (rate(gradpilot_decision_seconds_bucket{SELECT}[$__rate_interval])))",
                    f"p{100 * q:.0f}",
                )
                for q in (0.5, 0.9, 0.99)
            ),
            unit="s",
            width=6,
        ),
        row("Health"),
        graph(
            "Ranks",
            "Ranks of each run with an open session, and how many the job has.",
            target(by_run("gradpilot_ranks"), f"{RUN} connected"),
            target(by_run("gradpilot_world_size"), f"{RUN} in the job"),
            unit="none",
            steps=True,
            width=6,
        ),
        graph(
            "Non-finite steps and failed agreements",
            "Steps with a NaN or infinite gradient, and plan switches that the ranks could not"
            " agree on, per drawn point.",
            target(
                growth("gradpilot_nonfinite_steps_total", "run, model", SELECT), f"{RUN} non-finite"
            ),
            target(
                growth("gradpilot_agreement_failures_total", "run, model", SELECT),
                f"{RUN} agreement",
            ),
            unit="none",
            bars=True,
            width=6,
        ),
        graph(
            "Reports",
            "Reports a second that arrived.",
            target(rate_by_run("gradpilot_reports_total")),
            unit="reqps",
            width=6,
        ),
        graph(
            "Lost reports and policy errors",
            "Reports dropped by agents or refused by the controller, and decisions that ended in an"
            " error, per drawn point.",
            target(
                growth("gradpilot_agent_reports_dropped_total", "run, model", SELECT),
                f"{RUN} dropped",
            ),
            target(
                growth("gradpilot_reports_refused_total", "reason", SELECT), "refused: {{reason}}"
            ),
            target(
                growth("gradpilot_policy_errors_total", "run, model", SELECT),
                f"{RUN} policy error",
            ),
            unit="none",
            bars=True,
            width=6,
        ),
        graph(
            "Rejected plans and dropped residuals",
            "Plans that a rank could not carry out, and residuals that were thrown away, per drawn"
            " point. Both are rare.",
            target(growth("gradpilot_plans_rejected_total", "run, model", SELECT), f"{RUN} plans"),
            target(
                growth("gradpilot_residual_resets_total", "run, model", SELECT),
                f"{RUN} residuals",
            ),
            unit="none",
            bars=True,
            width=12,
        ),
        graph(
            "Refused sessions and restarts of the policy process",
            "Agents that were turned away, by status code, and policy processes that were replaced"
            " after a time-out or crash, per drawn point.",
            target(growth("gradpilot_sessions_refused_total", "code"), "refused: {{code}}"),
            target(growth("gradpilot_solver_restarts_total", "job"), "policy process"),
            unit="none",
            bars=True,
            width=12,
        ),
    ]


def dashboard() -> Json:
    """Return the whole dashboard."""
    return {
        "id": None,
        "uid": "gradpilot",
        "title": "gradpilot",
        "description": "Gradient communication of the runs of one gradpilot controller.",
        "tags": ["gradpilot"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "fiscalYearStartMonth": 0,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [],
        "annotations": {
            "list": [
                {
                    "name": "Switches",
                    "enable": True,
                    "hide": False,
                    "iconColor": "blue",
                    "datasource": {"type": "prometheus", "uid": DATASOURCE},
                    "expr": f"changes(gradpilot_plan_id{SELECT}[$__interval]) > 0",
                    "titleFormat": "new plan",
                    "textFormat": RUN,
                    "step": "",
                }
            ]
        },
        "templating": {
            "list": [
                variable("run", "Run", "label_values(gradpilot_step, run)"),
                variable("model", "Model", 'label_values(gradpilot_step{run=~"$run"}, model)'),
            ]
        },
        "panels": place(panels()),
    }


def render(datasource: str = DATASOURCE) -> str:
    """Return the dashboard as the text of its file."""
    text = json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"
    return text.replace(json.dumps(DATASOURCE), json.dumps(datasource))


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--datasource", default=DATASOURCE, help="uid of the data source")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to write")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(render(args.datasource), encoding="utf-8")


if __name__ == "__main__":
    main()

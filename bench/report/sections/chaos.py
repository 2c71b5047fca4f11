"""Faults: a job disturbed at random."""

from __future__ import annotations

from bench.report.results import Result
from bench.report.section import Section, from_verdicts

TEXT = """
A job of {ranks} real processes over gloo, disturbed at random: plans that reach one rank late
({late}), twice ({twice}), in the wrong order ({order}) or never ({never}), and a controller that
is killed at a random point and started again ({kills} times). {schedules} schedules, {steps}
steps, {switches} agreed switches, {minutes} minutes. Looked for are schedules that hang, steps in
which two ranks carry out different plans, and parameters that differ afterwards. {targets} The
tests run ten schedules.
"""


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    (row,) = result.document["rows"]
    return {
        "ranks": f"{row['ranks']}",
        "late": f"{row['plans_delay']}",
        "twice": f"{row['plans_duplicate']}",
        "order": f"{row['plans_reorder']}",
        "never": f"{row['plans_drop']}",
        "kills": f"{row['kills']}",
        "schedules": f"{row['schedules']}",
        "steps": f"{row['steps']:,}",
        "switches": f"{row['switches']}",
        "minutes": f"{row['seconds'] / 60:.1f}",
    }


SECTION = Section(
    position=70,
    title="Faults",
    result="chaos",
    text=TEXT,
    places=places,
    headlines=from_verdicts("^schedules that hang", "^steps with different plans"),
)

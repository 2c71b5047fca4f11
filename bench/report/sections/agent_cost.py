"""What the agent costs a rank beside its steps: processor time and memory."""

from __future__ import annotations

from bench.report.results import Result, Row, table
from bench.report.section import Section, from_verdicts

TEXT = """
A small model is trained by {ranks} ranks over loopback at {pace} steps a second, with a
controller that is there all the time. Shares are of one core, the worst rank counts. Of the
agent: the time of its own threads, and of the process that watches over a rank; threads that
torch started are in the whole process only, where the three ways to train took turns.

{shares}

Memory, while an operator pins one option after another:

{memory}

{targets}
"""

THREADS = ("main", "gloo", "the agent's together", "watcher (a process)")
"""Threads that are shown; the file has all."""

REASONS = {
    "beyond plain DDP": "most of it is what any hook in Python costs: torch's own has it, too",
}


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    rows = result.rows(case="cpu")
    memory = result.rows(case="memory")
    ways = list(dict.fromkeys(row["steps"] for row in rows))
    return {
        "ranks": f"{len(memory)}",
        "pace": f"{min(row['steps_per_s'] for row in rows):.0f}",
        "shares": table(
            ("thread", *ways),
            [
                (thread, *(f"{100 * _worst(rows, way, thread):.2f} %" for way in ways))
                for thread in THREADS
            ],
        ),
        "memory": table(
            (
                "rank",
                "steps",
                "switches",
                "begins at, MB",
                "half",
                "ends",
                "growth in the last half",
            ),
            [
                (
                    f"{row['rank']}",
                    f"{row['steps']:,}",
                    f"{row['switches']}",
                    f"{row['resident_mb_first']:.1f}",
                    f"{row['resident_mb_half']:.1f}",
                    f"{row['resident_mb_last']:.1f}",
                    f"{row['last_half_growth_mb']:.2f} MB,"
                    f" {row['last_half_slope_kb_per_step']:.3f} kB a step",
                )
                for row in memory
            ],
        ),
    }


def _worst(rows: list[Row], way: str, thread: str) -> float:
    own = [row for row in rows if (row["steps"], row["thread"]) == (way, thread)]
    return float(max(row["share_mean"] for row in own))


SECTION = Section(
    position=12,
    title="What the agent costs beside its steps",
    result="agent_cost",
    text=TEXT,
    places=places,
    headlines=from_verdicts("share of a core$", "^growth of the resident set"),
    reasons=REASONS,
)

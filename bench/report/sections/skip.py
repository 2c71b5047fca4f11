"""Skipping: a ring that leaves steps out, its time and what it costs."""

from __future__ import annotations

from bench.report.results import Result, Row, table
from bench.report.section import Section, from_verdicts

TEXT = """
A ring of N ranks that skips S of its reduce steps takes 2 (N - 1) - S instead of 2 (N - 1). Timed
on emulated hosts with {link}, {blocks} blocks of one all-reduce for each S, in an order of their
own. *Beside its steps* is the time over that of the ring that skips nothing, times its share of
the steps, median of blocks with least and greatest; *beside the link*, over bytes and round trips
of the link as asked for.

{times}

What skipping costs in accuracy, by trainings on virtual ranks, each with the learning rate that
suits it; the last column is with the rate of all-reduce. Accuracy and time are not of the same
run here: [time to accuracy](#time-to-accuracy) has both together.

{accuracies}

{targets}
"""


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    times, trained = result.rows(case="time"), result.rows(case="accuracy")
    first = times[0]
    return {
        "link": f"{first['rate_mbit']:g} Mbit/s and a round trip of {first['rtt_ms']:g} ms",
        "blocks": f"{first['blocks']}",
        "times": table(
            ("N", "MB", "S", "ms", "beside its steps", "beside the link", "speed-up", "at most"),
            [_time(row) for row in times],
        ),
        "accuracies": table(
            ("data", "what", "accuracy, %", "less than all-reduce, points", "the same at its rate"),
            [_accuracy(row) for row in trained],
        ),
    }


def _time(row: Row) -> tuple[str, ...]:
    beside = "foretells"
    if row["skip"]:
        spread = f"{row['over_steps_least']:.3f} to {row['over_steps_most']:.3f}"
        beside = f"{row['over_steps']:.3f} ({spread})"
    return (
        f"{row['ranks']}",
        f"{row['megabytes']}",
        f"{row['skip']}",
        f"{row['measured_ms']:.1f}",
        beside,
        f"{row['over_link']:.3f}",
        f"{row['speedup']:.2f}",
        f"{row['most_speedup']:.2f}",
    )


def _accuracy(row: Row) -> tuple[str, ...]:
    what = "all-reduce"
    if row["skip"]:
        kept = ", feedback" if row["feedback"] else ""
        what = f"S = {row['skip']}, {row['choice']}, divisor {row['divisor']}{kept}"
    return (
        row["data"],
        what,
        f"{row['accuracy_percent']:.2f}",
        f"{row['less_than_dense_points']:+.2f}",
        f"{row['less_at_dense_rate_points']:+.2f}",
    )


SECTION = Section(
    position=34,
    title="Skipping ring steps",
    result="skip",
    text=TEXT,
    places=places,
    given={"1": "part of a formula", "2": "part of a formula"},
    headlines=from_verdicts("^ring that skips, time over"),
)

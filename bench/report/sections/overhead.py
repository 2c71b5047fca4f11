"""What managing costs: a managed dense plan and our ring beside what they replace."""

from __future__ import annotations

from collections.abc import Mapping

from bench.report.results import Result, Row, number, table
from bench.report.section import Headline, Section

TEXT = """
One model is trained by {ranks} ranks plainly, under PyTorch's own Python hook `allreduce_hook`,
and under a dense plan, in blocks that take turns. Ratio of step times to plain DDP, median of
{blocks} blocks, first and last decile in brackets:

{managed}

The cost is a fixed time a bucket, not a share of the step: {fixed} ms for the {buckets} buckets
of the short step without a controller, of which PyTorch's hook alone takes {hook}. That is the
price of any hook that is written in Python: autograd's thread has to take the GIL for every
bucket, and gloo's thread has to take it again for the callback, while a plain DDP step touches
Python in neither. Most dense steps are *quiet* (`worker_agent/quiet_steps.py`): a bucket is
averaged where it lies and that is all. The rest is ours: the steps between them, in which buckets
are identified, timed and sampled, and the exchange before a decision. On so short a step this
shows; where a step is so short, and dense is best, do not manage it.

One all-reduce by our ring, with no step skipped, over the backend's own time, deciles in
brackets:

{ring}

What is left is the GIL between the steps: the backend runs its ring in C++, ours wakes up a
Python thread for every slice. Where deciles are far apart, the median says little. Our ring posts
all receives early, which on links with latency saves a round trip a step; loopback has none.

{targets}
"""

WHY = (
    "a fixed time a bucket, most of it the price of any Python hook; 1 % is less than the spread of"
    " single blocks"
)


LOOSER = "<= 1.03"


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    managed = result.rows(case="managed dense / plain")
    short = _shortest(result)
    hook = _hook(result, short)
    return {
        "ranks": f"{short['ranks']}",
        "blocks": f"{short['blocks']}",
        "buckets": f"{short['buckets']}",
        "fixed": f"{_extra(short):.1f}",
        "hook": f"{_extra(hook):.1f}",
        "managed": table(
            ("step", "controller", "PyTorch's hook", "gradpilot, dense plan"),
            [
                (
                    f"{row['plain_step_ms']:.0f} ms",
                    row["controller"],
                    _ratio(_hook(result, row)),
                    _ratio(row),
                )
                for row in managed
            ],
        ),
        "ring": _ring(result),
    }


def words(result: Result) -> Mapping[str, bool]:
    """Return what the text says in words, and whether it is so."""
    managed = result.rows(case="managed dense / plain")
    short = min(row["ratio_median"] for row in managed if row["plain_step_ms"] < 50)
    long = max(row["ratio_median"] for row in managed if row["plain_step_ms"] > 50)
    return {"a fixed time a bucket, not a share of the step": short > long}


def headlines(result: Result) -> list[Headline]:
    """Return what a user pays in a job with its own controller, against the looser target."""
    verdicts = result.matching("managed dense plan .* controller embedded")
    return [
        (one["name"], one["target"], number(one["measured"]), one["holds"])
        for one in verdicts
        if one["target"] == LOOSER
    ]


def _shortest(result: Result) -> Row:
    rows = result.rows(case="managed dense / plain", controller="none")
    return min(rows, key=lambda row: row["plain_step_ms"])


def _hook(result: Result, row: Row) -> Row:
    case = "torch's allreduce_hook / plain"
    return result.row(case=case, batch=row["batch"], controller=row["controller"])


def _extra(row: Row) -> float:
    return float((row["ratio_median"] - 1.0) * row["plain_step_ms"])


def _ratio(row: Row) -> str:
    return f"{row['ratio_median']:.3f} ({row['ratio_p10']:.2f} to {row['ratio_p90']:.2f})"


def _ring(result: Result) -> str:
    rows = result.rows(case="ring S=0 / native all-reduce")
    sizes = sorted({row["megabytes"] for row in rows})
    cells = []
    for ranks in sorted({row["ranks"] for row in rows}):
        own = {row["megabytes"]: row for row in rows if row["ranks"] == ranks}
        cells.append((f"{ranks}", *(_ratio(own[size]) for size in sizes)))
    return table(("ranks", *(f"{size} MB" for size in sizes)), cells)


SECTION = Section(
    position=10,
    title="What managing costs",
    result="overhead",
    text=TEXT,
    places=places,
    reasons={"managed dense plan": WHY},
    words=words,
    headlines=headlines,
)

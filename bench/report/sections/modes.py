"""What managing costs in every mode of DDP, over loopback and an emulated link."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from bench.report.results import ReportError, Result, Row, table
from bench.report.section import Section, from_verdicts

TEXT = """
The ways to train of [compatibility.md](compatibility.md), each with {ranks} ranks, a model of
{elements} elements in {buckets} buckets (where a mode does not make them others) and a
{controller} controller. In every mode a job without gradpilot and the same job under a dense plan
take turns in blocks of {steps} steps, {blocks}; all rows of an environment are of one run. Step
without gradpilot, and the ratio of the managed step to it: median of blocks, first and last decile
in brackets.

{modes}

A hook costs a fixed time a bucket, so these ratios are those of steps as long as these; [what
managing costs](#what-managing-costs) has shorter ones, and how much of it is the price of any hook
in Python. Over the link the gradient takes {gradient} ms, about as long as the model computes, and
{hidden}. FSDP2 calls us once for each unit instead of each bucket. At the end of every row both
jobs had {same}.

{targets}
"""

HIDDEN = "part of what a hook costs passes while the link is busy anyway"
SHOWN = "what a hook costs is not less there"

WHY = "a fixed time a bucket, most of it the price of any Python hook"


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    every = result.rows(case="mode")
    environments = list(dict.fromkeys(row["environment"] for row in every))
    plain = _common(every)
    same = all(row["bit_equal"] for row in every)
    blocks = {row["environment"]: row["blocks"] for row in every}
    names = {"beside rank 0": "separate, low-priority"}
    return {
        "ranks": f"{plain['ranks']}",
        "elements": f"{plain['elements']:,}",
        "buckets": f"{plain['buckets']}",
        "controller": names.get(plain["controller"], "missing"),
        "steps": f"{plain['block_steps']}",
        "blocks": " and ".join(f"{n} of each over {_over(where)}" for where, n in blocks.items()),
        "modes": table(
            (
                "mode",
                *(
                    cell
                    for where in environments
                    for cell in (f"step over {_over(where)}", "managed / plain")
                ),
            ),
            [
                (what, *(cell for where in environments for cell in _cells(result, where, what)))
                for what in dict.fromkeys(row["what"] for row in every)
            ],
        ),
        "gradient": f"{_gradient_ms(every):.0f}",
        "hidden": HIDDEN if _hidden(every) else SHOWN,
        "same": "the same parameters, bit for bit" if same else "NOT the same parameters",
    }


def words(result: Result) -> Mapping[str, bool]:
    """Return what the text says in words, and whether it is so."""
    every = result.rows(case="mode")
    computing = _common(every)["plain_step_ms"]
    return {
        "about as long as the model computes": 0.5 < _gradient_ms(every) / computing < 1.5,
    }


def _hidden(every: list[Row]) -> bool:
    """Return whether the median ratio is less over the link than over loopback."""
    over_link, over_loopback = (
        statistics.median(
            r["ratio_median"] for r in every if (r["rate_mbit"] is not None) is linked
        )
        for linked in (True, False)
    )
    return bool(over_link < over_loopback)


def _gradient_ms(every: list[Row]) -> float:
    """Return how long the link needs for the gradient of the mode that has nothing special."""
    rate = next(row["rate_mbit"] for row in every if row["rate_mbit"] is not None)
    return float(32e-3 * _common(every)["elements"] / rate)


def _common(every: list[Row]) -> Row:
    """Return the row of the mode that has nothing special, over loopback."""
    for row in every:
        if row["mode"] == "plain":
            return row
    raise ReportError("modes.json has no row of the mode 'plain'")


def _over(environment: str) -> str:
    return environment if environment == "loopback" else f"a link of {environment}"


def _cells(result: Result, environment: str, what: str) -> tuple[str, str]:
    row = result.row(case="mode", environment=environment, what=what)
    spread = f"{row['ratio_p10']:.2f} to {row['ratio_p90']:.2f}"
    return f"{row['plain_step_ms']:.0f} ms", f"{row['ratio_median']:.3f} ({spread})"


SECTION = Section(
    position=11,
    title="What managing costs in every mode",
    result="modes",
    text=TEXT,
    places=places,
    words=words,
    reasons={"^managed dense plan": WHY},
    headlines=from_verdicts("^managed dense plan"),
)

"""The cost model beside measured collectives."""

from __future__ import annotations

from bench.report.results import Result, table
from bench.report.section import Section, from_verdicts

TEXT = """
Every collective that a compressor can ask for, and every schedule of our own, timed on emulated
hosts: {cells} cells of collective, number of ranks ({ranks}), rate ({rates} Mbit/s), round trip
({rtts} ms) and size ({least} to {most} kB). Predicted from the link *as asked for*, with nothing
fitted; from a link *fitted* to every second size, as a controller fits it, judged on the sizes
between; and by the best *affine* form, fitted to every second network and judged on the others,
which tells how good any prediction of this kind could be.

{errors}

The coefficients: latencies (alpha) and payloads (M beta) that the model reckons with, those that
fit the measured times best, and the payloads that the busiest rank really sent. Where they
differ, the backend does something else than the textbook.

{coefficients}

{targets}
"""

REASONS = {
    "all_to_all": "gloo's sends all parts at once, the cost model reckons with one after another;"
    " policies do not choose it unless told to",
    "": "up to 8 ranks shared two cores, one of which another program used, so much of the time of"
    " a small collective is waiting for a core; what is the model's own error was not told apart",
}

PREDICTIONS = {"asked": "as asked for", "fitted": "fitted", "affine": "affine"}


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    cells = result.rows(case="cell")

    def every(field: str, joined: str = ", ") -> str:
        return joined.join(f"{value:g}" for value in sorted({row[field] for row in cells}))

    sizes = [row["bytes"] for row in cells]
    return {
        "cells": f"{len(cells)}",
        "ranks": every("ranks", " and "),
        "rates": every("rate_mbit"),
        "rtts": every("rtt_ms"),
        "least": f"{min(sizes) / 1e3:,.0f}",
        "most": f"{max(sizes) / 1e3:,.0f}",
        "errors": table(
            ("link", "collective", "median error, %", "p90, %", "bias, %", "cells"),
            [
                (
                    PREDICTIONS[row["prediction"]],
                    row["collective"],
                    f"{row['median_error_percent']:.1f}",
                    f"{row['p90_error_percent']:.1f}",
                    f"{row['bias_percent']:+.1f}",
                    f"{row['cells']}",
                )
                for row in result.rows(case="errors")
            ],
        ),
        "coefficients": table(
            ("collective", "N", "model", "best fit", "busiest rank sent"),
            [
                (
                    row["collective"],
                    f"{row['ranks']}",
                    f"{row['cost_alphas']:.2f} alpha + {row['cost_payloads']:.3f} M beta",
                    f"{row['affine_alphas']:.2f} alpha + {row['affine_payloads']:.3f} M beta",
                    f"{row['sent_most_payloads']:.3f} M",
                )
                for row in result.rows(case="coefficients")
            ],
        ),
    }


SECTION = Section(
    position=32,
    title="The network model",
    result="network_model",
    text=TEXT,
    places=places,
    reasons=REASONS,
    headlines=from_verdicts("of predicted time, fitted link, all:"),
)

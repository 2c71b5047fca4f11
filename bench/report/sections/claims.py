"""Claims of the papers: what became of them, in one sentence."""

from __future__ import annotations

from bench.report.results import Result
from bench.report.section import Section

TEXT = """
[claims.md](claims.md) has what three papers say in numbers, how it was tried and what does not
hold, with causes. {held} of {checks} checks of {claims} claims hold; all checks of {whole} claims
do.
"""


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""
    checks: dict[str, list[bool]] = {}
    for row in result.document["rows"]:
        if "holds" in row:
            checks.setdefault(row["claim"], []).append(row["holds"])
    every = [holds for one in checks.values() for holds in one]
    return {
        "held": f"{sum(every)}",
        "checks": f"{len(every)}",
        "claims": f"{len(checks)}",
        "whole": f"{sum(all(one) for one in checks.values())}",
    }


SECTION = Section(
    position=30, title="Claims of the papers", result="claims", text=TEXT, places=places
)

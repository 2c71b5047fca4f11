"""The table of docs/claims.md: how many checks of every claim hold."""

from __future__ import annotations

from bench.report.results import ReportError, Result, table

SAYS = {
    "T1": "Three alpha-beta formulas give the published times of all-gather and of AR-Topk over"
    " ring and tree, and the winner",
    "T2": "The formula of a dense ring gives the published times",
    "T3": "Three thresholds on latency over push time pick the cheapest form, always",
    "T4": "From 2 to 8 ranks all-gather slows down far more than AR-Topk over a ring",
    "T5": "`star` takes every rank as the source equally often, so nobody's largest element waits"
    " for more than N - 1 steps; `var` does not",
    "T6": "The gain of top-k grows with the ratio and has known values on independent elements",
    "T7": "A ring that skips S steps takes 2(N - 1) - S",
    "T8": "What skipping costs in error by divisor, the same at 1,024 ranks, and where the better"
    " divisor changes",
    "T9": "Where each rank holds one class, rotating what is skipped beats a fixed choice and stays"
    " within 2 points of all-reduce",
    "T10": "At equal bits chunks beat single elements where large elements lie together, and lose"
    " elsewhere",
    "T11": "THC errs as its grid says; saturation costs what ranks and wire width decide",
    "T12": "A partial rotation keeps the norm, can be undone and evens out spikes",
    "T13": "NSGA-II finds the ratio that a grid finds, in less than half a second",
    "T14": "Sixteen bits halve the bytes and cost no accuracy",
    "T15": "AR-Topk at 10 % loses at most 0.7 points; gain orders the ratios of a family",
    "T16": "A ratio that follows the network is as accurate as the best fixed one in less time on"
    " the wire",
    "T17": "Skipping speeds a step up by no more than its share of communication allows",
}
"""What is claimed, in words: not measured, so written here."""


def block(result: Result) -> str:
    """Return the table.

    Args:
        result: ``claims.json``.

    Raises:
        ReportError: A claim has no words, or words have no claim.
    """
    tried = {row["claim"]: row for row in result.document["rows"] if "holds" in row}
    if set(tried) != set(SAYS):
        raise ReportError(f"claims.json and their words differ: {sorted(set(tried) ^ set(SAYS))}")
    rows = []
    for key, words in SAYS.items():
        checks = [row["holds"] for row in result.rows(claim=key) if "holds" in row]
        rows.append((key, words, tried[key]["how"], f"{sum(checks)} of {len(checks)}"))
    return table(("claim", "what it says", "how", "checks that hold"), rows)

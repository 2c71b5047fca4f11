"""The claims about the cost of compressors, checked against measured rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from bench import _baselines, results_file

Row = dict[str, Any]

_FULL_STAGES = 31
MOST_MEMORY = 2.0
"""Peak extra memory of a compressor, in buckets."""


def verdicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a verdict for every claim whose compressor was measured.

    Selection is compared by what it does before the last collective, as ``torch.topk`` is all
    selection; the others by compressing and decompressing together, as a copy is both.
    """
    times = [row for row in rows if row["kind"] == "time"]
    found: list[dict[str, Any]] = []
    for threads, heap in dict.fromkeys((row["threads"], row["heap"]) for row in times):
        here = [row for row in times if (row["threads"], row["heap"]) == (threads, heap)]
        where = f"{threads} thread{'s' if threads > 1 else ''}, heap {heap}"
        found += [
            results_file.verdict(f"{name}, {where}", target, round(measured, 2), holds)
            for name, target, measured, holds in _times(here)
        ]
    return found + list(_memory(rows))


def _times(rows: Sequence[Row]) -> Iterator[tuple[str, str, float, bool]]:
    """Yield name, target, measured, holds for the rows of one configuration."""
    read = _baseline(rows, _baselines.SUM_OF_SQUARES)["compress_ms"]
    copy = _baseline(rows, _baselines.COPY)["compress_ms"]
    for name in ("mstopk", "threshold", "sidco"):
        row = _near_one_percent([row for row in rows if row["compressor"] == name])
        if row is not None:
            exact = _near_one_percent([r for r in rows if r["what"].startswith(_baselines.TOPK)])
            assert exact is not None
            gain = exact["compress_ms"] / row["compress_ms"]
            yield f"{exact['what']} / {row['what']}, compress", ">= 3", gain, gain >= 3.0
    row = _near_one_percent([row for row in rows if row["compressor"] == "topkc"])
    if row is not None:
        cost = row["compress_ms"] / read
        yield f"{row['what']}, compress / sum of squares", "<= 2", cost, cost <= 2.0
    for row in rows:
        if row["compressor"] == "int8" or _is(row, "powersgd", rank=4, step="full"):
            cost = _both(row) / copy
            name = f"{row['what']} on {row['matrices']}, compress and decompress / copy"
            yield name, "<= 5", cost, cost <= 5.0
    yield from _rotations(rows)


def _rotations(rows: Sequence[Row]) -> Iterator[tuple[str, str, float, bool]]:
    """Yield how much faster a rotation in blocks is, for every pair that differs in it alone."""
    for full in rows:
        if not _is(full, "thc", stages=_FULL_STAGES):
            continue
        others = set(full["settings"]) - {f"stages={_FULL_STAGES}"}
        for block in rows:
            if (
                block is not full
                and block["compressor"] == "thc"
                and others < set(block["settings"])
            ):
                gain = _both(full) / _both(block)
                name = f"thc rotated whole / {block['what']}, compress and decompress"
                yield name, ">= 3", gain, gain >= 3.0


def _memory(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield one verdict for every compressor: the hungriest member of its ladder."""
    worst: dict[str, Row] = {}
    for row in rows:
        if row["kind"] == "memory" and row["ladder"]:
            known = worst.get(row["compressor"])
            if known is None or row["peak_extra_buckets"] > known["peak_extra_buckets"]:
                worst[row["compressor"]] = row
    for row in worst.values():
        most = row["peak_extra_buckets"]
        yield results_file.verdict(
            f"{row['what']}, peak extra memory / bucket",
            f"<= {MOST_MEMORY:g}",
            most,
            most <= MOST_MEMORY,
        )


def _baseline(rows: Sequence[Row], name: str) -> Row:
    return next(row for row in rows if row["what"] == name)


def _near_one_percent(rows: Sequence[Row]) -> Row | None:
    """Return the row whose bytes come closest to values and indices of 1 % of all elements."""

    def distance(row: Row) -> float:
        return abs(math.log(row["wire_bytes"] / (0.08 * row["elements"])))

    return min(rows, key=distance, default=None)


def _is(row: Row, name: str, **settings: object) -> bool:
    wanted = {f"{setting}={value}" for setting, value in settings.items()}
    return row["compressor"] == name and wanted <= set(row["settings"])


def _both(row: Row) -> float:
    both: float = row["compress_ms"] + row["decompress_ms"]
    return both

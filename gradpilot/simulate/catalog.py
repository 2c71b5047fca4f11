"""The catalog that agents would send: families with their wire rounds, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradpilot.protos.messages import (
    BucketRounds,
    ComputeSample,
    Family,
    LadderPoint,
    Layout,
    WireRound,
)
from gradpilot.simulate.recorded import document, settings

MIN_SKIP_ELEMENTS = 1024
"""Payloads with fewer elements are never skipped, nor those with fewer than N (N - 1)."""


def families(layout: Layout, ranks: int) -> tuple[Family, ...]:
    """Return what agents can do on a layout with N ranks, as their own catalog says it."""
    forms = document()["families"]
    able = [form for form in forms if form["most_ranks"] is None or ranks <= form["most_ranks"]]
    return tuple(_family(form, layout, ranks) for form in able)


def _family(form: Mapping[str, Any], layout: Layout, ranks: int) -> Family:
    floor = 4 * max(MIN_SKIP_ELEMENTS, ranks * (ranks - 1))

    def rounds(elements: int, ratio: float) -> BucketRounds:
        kept = max(1, int(elements * ratio))
        sizes = ((kind, round(each * kept + rest), may) for kind, each, rest, may in form["rounds"])
        return BucketRounds(
            tuple(WireRound(kind, size, may and size >= floor) for kind, size, may in sizes)
        )

    return Family(
        compressor=form["compressor"],
        settings=settings(form["settings"]),
        collectives=tuple(form["collectives"]),
        ladder=tuple(
            LadderPoint(ratio, tuple(rounds(b.elements, ratio) for b in layout.buckets))
            for ratio in form["ratios"]
        ),
        gain_model=form["gain_model"],
        gain_factor=form["gain_factor"],
        efficiency_exponent=form["efficiency_exponent"],
        memory_payloads=ranks if form["gathers"] else 1,
    )


def compute_samples(ranks: int, scale: float = 1.0) -> tuple[ComputeSample, ...]:
    """Return what compressors cost with N ranks, in the order of the agents' calibration.

    Timed at a few world sizes; in between and beyond linear in N, since the replies of an
    all-gather grow with it.

    Args:
        ranks: Ranks N.
        scale: Seconds of the job's device over those of the recording machine.
    """
    tables: dict[tuple[Any, ...], list[tuple[int, float, float]]] = {}
    for row in document()["calibration"]:
        key = (row["compressor"], settings(row["settings"]), row["ratio"], row["elements"])
        seconds = (row["compress_seconds"], row["decompress_seconds"])
        tables.setdefault(key, []).append((row["ranks"], *seconds))
    gathering = {
        (form["compressor"], settings(form["settings"]))
        for form in document()["families"]
        if form["gathers"]
    }
    samples = []
    for (compressor, its_settings, ratio, elements), points in tables.items():
        compress, decompress = (_linear(points, ranks, i) for i in (1, 2))
        if len(points) == 1 and (compressor, its_settings) in gathering:
            decompress *= ranks / points[0][0]  # of few ranks only, so timed at one number of them
        samples.append(
            ComputeSample(
                compressor, its_settings, ratio, elements, scale * compress, scale * decompress
            )
        )
    return tuple(samples)


def _linear(points: list[tuple[int, float, float]], ranks: int, column: int) -> float:
    (n0, *low), (n1, *high) = min(points), max(points)
    a, b = low[column - 1], high[column - 1]
    if column == 1 or n0 == n1:  # what a rank does before it sends does not depend on the others
        return min(a, b)
    slope = max(b - a, 0.0) / (n1 - n0)
    return max(a + slope * (ranks - n0), min(a, b) * min(ranks / n0, 1.0))

"""Rows and verdicts from what ranks measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench import results_file
from bench.modes.catalog import MODES
from bench.modes.job import Told
from bench.modes.measure import Measured, Setup, where

LIMIT = 1.03
LEAST_BUCKETS = 4

Row = dict[str, Any]


def rows(setup: Setup, measured: Measured) -> list[Row]:
    """Return a row for every mode of an environment."""
    return [row(setup, mode, told) for mode, told in measured.items()]


def row(setup: Setup, mode: str, told: Sequence[Told]) -> Row:
    """Return the row of a mode.

    Of each block counts the rank that took longest; the ratio of a block is that of what follows
    each other there. ``ratio_all`` is of all blocks' times together.

    Args:
        setup: What was measured.
        mode: Its name.
        told: What every rank told of it.
    """
    plain, managed = (
        [max(of_ranks) for of_ranks in zip(*(getattr(one, copy) for one in told), strict=True)]
        for copy in ("plain", "managed")
    )
    ratios = [b / a for a, b in zip(plain, managed, strict=True)]
    deciles = statistics.quantiles(ratios, n=10)
    return {
        "case": "mode",
        "environment": where(setup.link),
        "rate_mbit": setup.link.rate_mbit if setup.link else None,
        "rtt_ms": setup.link.rtt_ms if setup.link else None,
        "mode": mode,
        "what": MODES[mode].what,
        "controller": "beside rank 0" if setup.controller else "none",
        "policy": told[0].policy,
        "ranks": len(told),
        "buckets": min(one.buckets for one in told),
        "elements": told[0].elements,
        "blocks": len(ratios),
        "block_steps": setup.block_steps,
        "plain_step_ms": round(1e3 * statistics.median(plain), 3),
        "managed_step_ms": round(1e3 * statistics.median(managed), 3),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_p10": round(deciles[0], 4),
        "ratio_p90": round(deciles[-1], 4),
        "ratio_all": round(sum(managed) / sum(plain), 4),
        "dense": all(one.dense for one in told),
        "bit_equal": all(one.bit_equal for one in told),
    }


def verdicts(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is claimed of every environment, then of all rows."""
    claims = []
    for environment in dict.fromkeys(one["environment"] for one in found):
        ours = [one for one in found if one["environment"] == environment]
        worst = max(ours, key=lambda one: float(one["ratio_median"]))
        middle = round(statistics.median(one["ratio_median"] for one in ours), 4)
        about = f"managed dense plan / plain, {environment}"
        for name, measured in (
            (f"median of {len(ours)} modes", middle),
            (f"worst mode, {worst['mode']}", worst["ratio_median"]),
        ):
            claims.append(
                results_file.verdict(
                    f"{about}: {name}", f"<= {LIMIT:g}", measured, measured <= LIMIT
                )
            )
    buckets = min(one["buckets"] for one in found)
    return [
        *claims,
        _all_are("parameters of both copies the same bits", "bit_equal", found),
        _all_are("every bucket dense and the agent at work all the time", "dense", found),
        results_file.verdict(
            "buckets of a step, least", f">= {LEAST_BUCKETS}", buckets, buckets >= LEAST_BUCKETS
        ),
    ]


def _all_are(name: str, field: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    wrong = [f"{one['mode']} ({one['environment']})" for one in found if not one[field]]
    measured = ", ".join(wrong) if wrong else "all"
    return results_file.verdict(f"{name}, of {len(found)} rows", "all", measured, not wrong)

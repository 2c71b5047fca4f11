"""Predictions beside measurements: errors, rows and verdicts.

Three predictions of the time of a collective, ``a * alpha + b * bytes * beta``:

* ``asked``: ``a`` and ``b`` of ``policies.cost``, latency and bandwidth as asked of the link.
  Nothing is fitted.
* ``fitted``: the same ``a`` and ``b``, latency and bandwidth fitted by ``policies.link`` to the
  collectives of every other size on the network, as a controller fits them; judged on the sizes
  between.
* ``affine``: ``a`` and ``b`` fitted to every other network for each collective and number of
  ranks, latency and bandwidth as asked; judged on the networks between. How good any affine form
  could be, and what its coefficients would be.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import results_file
from bench.netlab import Link
from bench.network_model.grid import Cell, bytes_per_second
from gradpilot.policies.base import Operation
from gradpilot.policies.cost import Affine, coefficients
from gradpilot.policies.link import fit_link

MEDIAN_LIMIT, P90_LIMIT = 0.05, 0.12

PREDICTIONS = ("asked", "fitted", "affine")
BACKEND = "gloo"

Floats = NDArray[np.float64]

REFITS = 30


@dataclass(frozen=True, slots=True)
class Judged:
    """A cell with a prediction.

    Attributes:
        cell: What was measured.
        prediction: One of ``PREDICTIONS``.
        seconds: What was predicted.
    """

    cell: Cell
    prediction: str
    seconds: float

    @property
    def error(self) -> float:
        """Return predicted over measured time, less 1."""
        return self.seconds / self.cell.median - 1


def form(kind: str, ranks: int) -> Affine:
    """Return the coefficients of ``policies.cost``."""
    return Affine(*coefficients(kind, ranks, 0, BACKEND))


def asked(cells: Sequence[Cell]) -> list[Judged]:
    """Return every cell as predicted from the link that was asked for."""
    return [
        Judged(c, "asked", form(c.kind, c.ranks).seconds(*_link(c.link), c.handed_in))
        for c in cells
    ]


def fitted(cells: Sequence[Cell]) -> list[Judged]:
    """Return the cells of every second size, predicted from a link fitted to the others."""
    found = []
    for ours in _groups(cells, lambda c: (c.ranks, c.link.rate_mbit, c.link.rtt_ms)):
        known, left = _halves(ours, lambda c: c.size)
        operations = [
            Operation(step, c.kind, c.handed_in, 0, seconds, 0.0, 0.0)
            for c in known
            for step, seconds in enumerate(c.seconds)
        ]
        link = fit_link(operations, ours[0].ranks, BACKEND)
        if link is None:
            continue
        found += [
            Judged(
                c,
                "fitted",
                form(c.kind, c.ranks).seconds(
                    link.alpha_seconds, link.beta_seconds_per_byte, c.handed_in
                ),
            )
            for c in left
        ]
    return found


def affine(cells: Sequence[Cell]) -> tuple[list[Judged], dict[tuple[str, int], Affine]]:
    """Return the cells of every second network, predicted by forms fitted to the others.

    Returns:
        The cells, and the form of each collective and number of ranks. Both are empty if there is
        one network only.
    """
    found: list[Judged] = []
    forms: dict[tuple[str, int], Affine] = {}
    for ours in _groups(cells, lambda c: (c.kind, c.ranks)):
        known, left = _halves(ours, lambda c: (c.link.rate_mbit, c.link.rtt_ms))
        if not left:
            continue
        best = forms[ours[0].kind, ours[0].ranks] = fit_form(known)
        found += [Judged(c, "affine", best.seconds(*_link(c.link), c.handed_in)) for c in left]
    return found, forms


def fit_form(cells: Sequence[Cell]) -> Affine:
    """Return the coefficients, >= 0, with the least sum of the sizes of relative errors.

    A stall makes a collective longer, nothing makes it shorter, so squares would follow the stalls.
    """
    seconds = np.array([c.median for c in cells])
    columns = np.array([[_link(c.link)[0], c.handed_in * _link(c.link)[1]] for c in cells])
    both = _solve(columns, seconds, 1 / seconds)
    for _ in range(REFITS):
        predicted = np.maximum(columns @ both, 1e-9)
        off = np.maximum(np.abs(seconds / predicted - 1), 1e-3)
        both = _solve(columns, seconds, 1 / (predicted * np.sqrt(off)))
    return Affine(float(both[0]), float(both[1]))


def _solve(columns: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Return the two coefficients, >= 0, of weighted least squares."""
    matrix, target = columns * weights[:, None], seconds * weights
    both: Floats = np.asarray(np.linalg.lstsq(matrix, target, rcond=None)[0], dtype=np.float64)
    if both.min() >= 0:
        return both
    # One is 0: the better of the two fits of the other alone.
    single = (matrix * target[:, None]).sum(axis=0) / (matrix**2).sum(axis=0)
    squares = [float(np.sum((matrix[:, i] * single[i] - target) ** 2)) for i in range(2)]
    return np.where(np.arange(2) == int(np.argmin(squares)), single, 0.0)


def errors(judged: Iterable[Judged]) -> tuple[float, float]:
    """Return median and 90th percentile of the size of the relative error."""
    sizes = [abs(one.error) for one in judged]
    return float(np.quantile(sizes, 0.5)), float(np.quantile(sizes, 0.9))


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return a row for every cell, then errors and coefficients by collective."""
    wide, forms = affine(cells)
    every = [*asked(cells), *fitted(cells), *wide]
    by_cell: dict[tuple[object, ...], dict[str, Judged]] = {}
    for one in every:
        by_cell.setdefault(_key(one.cell), {})[one.prediction] = one
    found = [_cell_row(c, by_cell[_key(c)]) for c in cells]
    kinds = sorted({c.kind for c in cells})
    for prediction in PREDICTIONS:
        for kind in ("all", *kinds):
            ours = [o for o in every if o.prediction == prediction and kind in ("all", o.cell.kind)]
            if ours:
                found.append(_error_row(prediction, kind, ours))
    for (kind, ranks), best in sorted(forms.items()):
        of_form = [c for c in cells if (c.kind, c.ranks) == (kind, ranks)]
        found.append(_form_row(kind, ranks, best, of_form))
    return found


def verdicts(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is claimed of the predictions that the cost model makes."""
    claims = []
    for row in found:
        if row["case"] != "errors" or row["prediction"] == "affine":
            continue
        of = f"{row['prediction']} link, {row['collective']}"
        for name, limit in (("median", MEDIAN_LIMIT), ("p90", P90_LIMIT)):
            measured = row[f"{name}_error_percent"]
            claims.append(
                results_file.verdict(
                    f"relative error of predicted time, {of}: {name}, %",
                    f"<= {100 * limit:g}",
                    measured,
                    measured <= 100 * limit,
                )
            )
    return claims


def _link(link: Link) -> tuple[float, float]:
    """Return latency and seconds per byte as asked for."""
    return link.one_way_seconds, 1 / bytes_per_second(link)


def _key(cell: Cell) -> tuple[object, ...]:
    return (cell.kind, cell.ranks, cell.link, cell.size)


def _groups(cells: Sequence[Cell], key: Callable[[Cell], Any]) -> list[list[Cell]]:
    found: dict[Any, list[Cell]] = {}
    for cell in cells:
        found.setdefault(key(cell), []).append(cell)
    return list(found.values())


def _halves(cells: Sequence[Cell], key: Callable[[Cell], Any]) -> tuple[list[Cell], list[Cell]]:
    """Return the cells with the first, third, ... value of a key, and the others."""
    order = {value: i for i, value in enumerate(sorted({key(c) for c in cells}))}
    known = [c for c in cells if order[key(c)] % 2 == 0]
    return known, [c for c in cells if order[key(c)] % 2]


def _cell_row(cell: Cell, predictions: dict[str, Judged]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "case": "cell",
        "collective": cell.kind,
        "ranks": cell.ranks,
        "rate_mbit": cell.link.rate_mbit,
        "rtt_ms": cell.link.rtt_ms,
        "bytes": cell.size,
        "handed_in_bytes": cell.handed_in,
        "measured_ms": round(1e3 * cell.median, 3),
        "least_ms": round(1e3 * min(cell.seconds), 3),
        "most_ms": round(1e3 * max(cell.seconds), 3),
        "repeats": len(cell.seconds),
        "sent_most_sizes": round(max(cell.sent) / cell.size, 3),
        "sent_all_sizes": round(sum(cell.sent) / cell.size, 3),
    }
    for name in PREDICTIONS:
        one = predictions.get(name)
        row[f"{name}_ms"] = round(1e3 * one.seconds, 3) if one else None
        row[f"{name}_error_percent"] = round(100 * one.error, 2) if one else None
    return row


def _error_row(prediction: str, kind: str, judged: Sequence[Judged]) -> dict[str, Any]:
    median, p90 = errors(judged)
    return {
        "case": "errors",
        "prediction": prediction,
        "collective": kind,
        "cells": len(judged),
        "median_error_percent": round(100 * median, 2),
        "p90_error_percent": round(100 * p90, 2),
        "bias_percent": round(100 * statistics.median(one.error for one in judged), 2),
    }


def _form_row(kind: str, ranks: int, best: Affine, cells: Sequence[Cell]) -> dict[str, Any]:
    known = form(kind, ranks)
    largest = max(c.size for c in cells)
    sent = [max(c.sent) / c.handed_in for c in cells if c.size == largest]
    return {
        "case": "coefficients",
        "collective": kind,
        "ranks": ranks,
        "cost_alphas": round(known.alphas, 3),
        "cost_payloads": round(known.payloads, 3),
        "affine_alphas": round(best.alphas, 3),
        "affine_payloads": round(best.payloads, 3),
        "sent_most_payloads": round(statistics.median(sent), 3),
    }

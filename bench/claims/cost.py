"""Claims about the alpha-beta cost model; numbers come from ``gradpilot.policies`` alone.

Units of the printed tables: milliseconds, latency in ms, bandwidth in Gbit/s, eight ranks, fp32.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from bench.claims.checks import (
    Check,
    Claim,
    Figure,
    Finding,
    at_most,
    between,
    close,
    exactly,
    near,
)
from gradpilot.policies.cost import (
    SPARSE,
    art_ring,
    cheapest_sparse,
    ring_all_reduce,
    sparse_all_gather,
    thresholds,
)

RANKS = 8
KINDS = ("all_gather", "art_ring", "art_tree")

PARAMETERS = {
    "ResNet18": 11_689_512,
    "ResNet50": 25_557_032,
    "AlexNet": 61_100_840,
    # The printed rows fit no published ViT: ViT-L/16 has 304 M parameters, ViT-B/16 87 M.
    "ViT": 133_260_000,
}
VIT_LARGE = 304_326_632

# Model, Gbit/s, ratio, then all-gather, AR-Topk ring, AR-Topk tree; latency 1 ms.
SPARSE_TABLE = (
    ("ResNet18", 10, 0.1, 54.0, 35.0, 43.2),
    ("ResNet18", 10, 0.01, 7.66, 18.1, 12.2),
    ("ResNet18", 10, 0.001, 3.28, 16.7, 9.0),
    ("ResNet50", 1, 0.1, 1148.0, 405.5, 745.0),
    ("ResNet50", 1, 0.01, 126.5, 58.8, 83.7),
    ("ResNet50", 1, 0.001, 14.35, 21.0, 16.1),
    ("AlexNet", 5, 0.1, 544.5, 200.4, 354.8),
    ("AlexNet", 5, 0.01, 61.75, 34.8, 42.6),
    ("AlexNet", 5, 0.001, 8.92, 19.3, 13.1),
    ("ViT", 1, 0.1, 5973.0, 2047.0, 3852.0),
    ("ViT", 1, 0.01, 601.8, 222.8, 385.2),
    ("ViT", 1, 0.001, 59.68, 36.7, 44.4),
)
SPARSE_ROWS_PRINTED = 36

_FEW_ROWS = (
    "The bound is the median over all rows of the published table, of which a third is at hand;"
    " half of the all-gathers among these are off by 5 to 8 %. No cell exceeds its own bound."
)

# Parameters, latency, Gbit/s, all-gather of the largest 0.1 % with its compression, dense ring.
DENSE_TABLE = (
    (1e8, 10, 10, 70.0, 716.0),
    (1e8, 10, 1, 111.0, 5773.0),
    (1e8, 100, 10, 340.0, 1975.0),
    (1e9, 10, 10, 482.0, 5774.0),
    (1e9, 10, 1, 898.0, 56190.0),
)
DENSE_ROWS_PRINTED = 12

# Latency and Gbit/s of a network, then the winner for each model at the ratios below; A all-gather,
# R AR-Topk ring, T AR-Topk tree.
PHASE_RATIOS = (0.1, 0.033, 0.011, 0.004, 0.001)
PHASES = (
    (1, 25, "TAAAA RAAAA RRAAA RRRTA"),
    (2, 20, "AAAAA RAAAA RTAAA RRRAA"),
    (4, 15, "AAAAA TAAAA RAAAA RRTAA"),
    (8, 10, "AAAAA AAAAA RAAAA RRTAA"),
    (16, 5, "AAAAA AAAAA RAAAA RRTAA"),
    (32, 1, "AAAAA RAAAA RRAAA RRRTA"),
    (1, 1, "RRRTA RRRRA RRRRR RRRRR"),
    (50, 1, "AAAAA TAAAA RTAAA RRRAA"),
    (50, 25, "AAAAA AAAAA AAAAA AAAAA"),
)
LETTERS = {"all_gather": "A", "art_ring": "R", "art_tree": "T"}


def link(milliseconds: float, gigabits: float) -> tuple[float, float]:
    """Return alpha (s) and beta (s/byte)."""
    return 1e-3 * milliseconds, 8e-9 / gigabits


def _sparse_table(quick: bool) -> Iterator[Finding]:
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    winners = 0
    for model, gigabits, ratio, *printed in SPARSE_TABLE:
        alpha, beta = link(1, gigabits)
        values = 4 * PARAMETERS[model] * ratio
        ours = {kind: 1e3 * SPARSE[kind](RANKS).seconds(alpha, beta, values) for kind in KINDS}
        theirs = dict(zip(KINDS, printed, strict=True))
        winners += cheapest_sparse(RANKS, alpha, beta, values) == min(KINDS, key=theirs.__getitem__)
        for kind in KINDS:
            errors[kind].append(abs(ours[kind] / theirs[kind] - 1))
    available = len(SPARSE_TABLE)
    yield Figure(f"rows available of {SPARSE_ROWS_PRINTED} printed", available)
    yield exactly("rows whose winner is the printed one", winners, available)
    for kind in KINDS:
        median = statistics.median(errors[kind])
        yield at_most(f"{kind}: median relative error", median, 0.026, _FEW_ROWS)
        yield at_most(f"{kind}: worst relative error", max(errors[kind]), 0.11)


def _dense_table(quick: bool) -> Iterator[Finding]:
    errors, costs = [], []
    for parameters, latency, gigabits, gathered, dense in DENSE_TABLE:
        alpha, beta = link(latency, gigabits)
        ours = ring_all_reduce(RANKS).seconds(alpha, beta, 4 * parameters)
        errors.append(abs(1e3 * ours / dense - 1))
        wire = sparse_all_gather(RANKS).seconds(alpha, beta, 4 * parameters * 1e-3)
        costs.append((1e6 * gathered - 1e9 * wire) / parameters)
    yield Figure(f"rows available of {DENSE_ROWS_PRINTED} printed", len(DENSE_TABLE))
    yield at_most("dense ring: worst relative error", max(errors), 0.025)
    what = "compression cost that the all-gather column implies, ns per element"
    yield between(f"{what}, least", round(min(costs), 2), 0.35, 0.42)
    yield between(f"{what}, greatest", round(max(costs), 2), 0.35, 0.42)


def _thresholds(quick: bool) -> Iterator[Finding]:
    at = thresholds(RANKS)
    yield close("8 ranks: ring beats tree below", at.ring_tree, 0.53125, 1e-12)
    yield close("8 ranks: ring beats all-gather below", at.ring_gather, 37 / 56, 1e-12)
    yield close("8 ranks: tree beats all-gather below", at.tree_gather, 5 / 6, 1e-12)
    yield exactly("2 ranks: bound below which ring beats all-gather", thresholds(2).ring_gather, 0)

    draws = 1_000 if quick else 10_000
    random = np.random.default_rng(0)
    right = 0
    for _ in range(draws):
        n = int(random.integers(2, 257))
        alpha, beta = 10 ** random.uniform(-6, -0.5), 10 ** random.uniform(-11, -7)
        values = 10 ** random.uniform(4, 9) * 10 ** random.uniform(-3, -1)
        costs = {kind: SPARSE[kind](n).seconds(alpha, beta, values) for kind in KINDS}
        right += costs[cheapest_sparse(n, alpha, beta, values)] == min(costs.values())
    yield exactly("share of random networks whose cheapest form is selected", right / draws, 1)

    sizes = (*(PARAMETERS[m] for m in ("ResNet18", "ResNet50", "AlexNet")), VIT_LARGE)
    agree = 0
    for latency, gigabits, winners in PHASES:
        alpha, beta = link(latency, gigabits)
        found = " ".join(
            "".join(
                LETTERS[cheapest_sparse(RANKS, alpha, beta, 4 * size * ratio)]
                for ratio in PHASE_RATIOS
            )
            for size in sizes
        )
        agree += sum(a == b for a, b in zip(found, winners, strict=True) if a != " ")
    cells = len(PHASES) * len(sizes) * len(PHASE_RATIOS)
    yield exactly("cells of the table of network phases with the expected winner", agree, cells)


def _scale_out(quick: bool) -> Iterator[Check]:
    alpha, beta = link(5, 1)
    values = 4 * PARAMETERS["ResNet50"] * 0.1
    for name, form, growth in (("all-gather", sparse_all_gather, 6.88), ("ring", art_ring, 2.65)):
        many, two = (form(n).seconds(alpha, beta, values) for n in (8, 2))
        yield near(f"{name}: time on 8 ranks over time on 2", many / two, growth, 0.01)
    gathered, ring = (
        form(2).seconds(alpha, beta, values) for form in (sparse_all_gather, art_ring)
    )
    yield at_most("2 ranks: time of all-gather over that of the ring", gathered / ring, 1.0)


CLAIMS = (
    Claim("T1", "The cost model gives the published times of three sparse forms",
          "paper", "by model", _sparse_table),
    Claim("T2", "The cost model gives the published times of a dense ring",
          "paper", "by model", _dense_table),
    Claim("T3", "Three thresholds tell the cheapest sparse form", "derived", "by model",
          _thresholds),
    Claim("T4", "All-gather grows with the ranks much faster than AR-Topk over a ring",
          "paper", "by model", _scale_out),
)  # fmt: skip

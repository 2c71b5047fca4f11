"""Inputs of decisions with a planted link, for the tests of policies and the solver benchmark."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradpilot.policies.base import BucketState, Inputs, Operation, PolicySettings
from gradpilot.policies.cost import coefficients
from gradpilot.policies.history import History
from gradpilot.protos.messages import (
    Assignment,
    Bucket,
    BucketRounds,
    ComputeSample,
    Family,
    LadderPoint,
    Layout,
    Option,
    Plan,
    Setting,
    WireRound,
)
from gradpilot.warm_up import Warmth

STAR = (Setting("selection", "star"),)
# Cumulative energy of a heavy-tailed gradient at messages.ENERGY_RATIOS.
ENERGY = (0.01, 0.025, 0.06, 0.10, 0.16, 0.24, 0.35, 0.48, 0.63, 0.78, 0.91, 0.98, 1.0)
SPARSE_RATIOS = (0.001, 0.003, 0.01, 0.03, 0.1)


def layout(sizes: tuple[int, ...]) -> Layout:
    return Layout.of(tuple(Bucket(f"bucket{i}", i, n) for i, n in enumerate(sizes)))


def _kept(n: int, ratio: float) -> int:
    return max(1, int(n * ratio))


def families(sizes: tuple[int, ...]) -> tuple[Family, ...]:
    def ladder(ratios: tuple[float, ...], rounds: Any) -> tuple[LadderPoint, ...]:
        return tuple(
            LadderPoint(r, tuple(BucketRounds(rounds(n, r)) for n in sizes)) for r in ratios
        )

    return (
        Family(
            "artopk",
            STAR,
            ("native", "ring"),
            ladder(
                SPARSE_RATIOS,
                lambda n, r: (
                    WireRound("broadcast", 4 * _kept(n, r), False),
                    WireRound("all_reduce", 4 * _kept(n, r)),
                ),
            ),
            "energy",
            0.75,
            0.25,
        ),
        Family(
            "bf16",
            (),
            ("native", "ring"),
            ladder((1.0,), lambda n, r: (WireRound("all_reduce", 2 * n),)),
        ),
        Family(
            "none",
            (),
            ("native", "ring"),
            ladder((1.0,), lambda n, r: (WireRound("all_reduce", 4 * n),)),
        ),
        Family(
            "topk",
            (),
            ("allgather",),
            ladder(SPARSE_RATIOS, lambda n, r: (WireRound("all_gather", 8 * _kept(n, r)),)),
            "energy",
            1.0,
            0.2,
            8,
        ),
    )


def compute_samples(scale: float = 1.0) -> tuple[ComputeSample, ...]:
    """Nanoseconds an element as on one CPU core: exact top-k about 9, casts 0.3."""
    samples = []
    for n in (1 << 14, 1 << 19):
        for ratio in SPARSE_RATIOS:
            cost = scale * 1e-9 * n * (3 + 6 * (ratio / 0.01) ** 0.1)
            samples.append(ComputeSample("topk", (), ratio, n, 3e-5 + cost, 2e-5 + 0.05 * cost))
            samples.append(ComputeSample("artopk", STAR, ratio, n, 3e-5 + cost, 2e-5 + 0.05 * cost))
        samples.append(ComputeSample("none", (), 1.0, n, 1e-6, 1e-6))
        samples.append(ComputeSample("bf16", (), 1.0, n, scale * 2e-10 * n, scale * 2e-10 * n))
    return tuple(samples)


def operations(
    alpha: float,
    beta: float,
    n_ranks: int,
    backend: str = "gloo",
    sizes: tuple[int, ...] = (4096, 262_144, 4_194_304),
    repeats: int = 4,
    age: float = 1.0,
    collective: str = "all_reduce",
) -> tuple[Operation, ...]:
    made = []
    for i in range(repeats):
        for size in sizes:
            a, b = coefficients(collective, n_ranks, 0, backend)
            seconds = a * alpha + b * size * beta
            made.append(Operation(i, collective, size, 0, seconds, 0.0, age + repeats - i))
    return tuple(made)


def inputs(
    *,
    mbit: float = 1000.0,
    alpha: float = 1e-3,
    ranks: int = 8,
    sizes: tuple[int, ...] = (1_000_000, 1_000_000, 500_000),
    compute_seconds: float = 0.05,
    overlap: float = 0.03,
    current: Option | None = None,
    backend: str = "gloo",
    **fields: Any,
) -> Inputs:
    """Return inputs whose operations obey a link of ``mbit`` and ``alpha`` exactly."""
    beta = 8e-6 / mbit
    made = layout(sizes)
    states = tuple(
        BucketState(overlap * i / max(len(sizes) - 1, 1), -1.0, float(n), -1.0, ENERGY)
        for i, n in enumerate(sizes)
    )
    base = Inputs(
        run="run",
        model="model",
        world_size=ranks,
        step=1000,
        seed=7,
        layout=made,
        families=families(sizes),
        compute=compute_samples(),
        operations=operations(alpha, beta, ranks, backend),
        buckets=states,
        compute_seconds=compute_seconds,
        steps_since_switch=1000,
        backend=backend,
        history=History(warmth=Warmth(warm=True)),  # else nothing may be skipped
        current=None if current is None else plan(made, (current,) * len(sizes)),
    )
    return replace(base, **fields)


def plan(of: Layout, options: tuple[Option, ...]) -> Plan:
    return Plan(
        1,
        1,
        of.digest,
        tuple(Assignment(b.fingerprint, o) for b, o in zip(of.buckets, options, strict=True)),
    )


def settings(**fields: Any) -> PolicySettings:
    return PolicySettings(**fields)

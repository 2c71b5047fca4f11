"""Claims about skipping steps of a ring: how many, what time that saves, what error it costs.

Letters: N ranks, S skipped steps, g_r gradient of a rank, gbar their mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.claims.checks import Check, Claim, Finding, at_most, close, exactly, near
from bench.claims.errors import mean_of, vnmse
from gradpilot.policies.cost import coefficients
from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import SCHEDULES
from gradpilot.worker_agent.virtual import run_schedules, virtual_step

RANKS, SKIP = 8, 4
MOST_RANKS = 1024


def ring(skip: int, divisor: str = "skip", rotation: str = "random") -> Option:
    """Return the option of an uncompressed ring that skips."""
    return Option(collective="ring", skip=skip, divisor=divisor, rotation=rotation)


def _steps(quick: bool) -> Iterator[Finding]:
    build = SCHEDULES.get("ring").build
    wrong = tried = 0
    for n in range(2, 17):
        for skip in range(n):
            schedules = [build(rank, n, skip=skip, shift=skip % n) for rank in range(n)]
            tried += n
            wrong += sum(
                len([step for step in s.steps if step.send]) != 2 * (n - 1) - skip
                for s in schedules
            )
    yield exactly(f"of {tried} schedules, those that do not send 2 (N - 1) - S times", wrong, 0)
    full, less = (len(build(0, RANKS, skip=s).steps) for s in (0, SKIP))
    yield near("8 ranks, 4 skipped: speed-up by number of steps", full / less, 1.40, 0.001)
    costs = [coefficients("ring", RANKS, s, "model") for s in (0, SKIP)]
    for name, which in (("latency", 0), ("bandwidth", 1)):
        ratio = costs[0][which] / costs[1][which]
        yield near(f"8 ranks, 4 skipped: speed-up where {name} counts alone", ratio, 1.40, 0.001)


def _error(quick: bool) -> Iterator[Finding]:
    n = 1 << (16 if quick else 20)
    draw = torch.Generator().manual_seed(0)
    own = list(torch.randn(RANKS, n, generator=draw))
    same = [own[0]] * RANKS
    share = SKIP / RANKS
    for name, grads, skip, drop in (
        ("independent", own, share, SKIP / (RANKS - SKIP)),
        ("identical", same, share**2, 0.0),
    ):
        mean = mean_of(grads)
        for divisor, expected in (("skip", skip), ("drop", drop)):
            found = vnmse(virtual_step(ring(SKIP, divisor), grads).mean, mean)
            what = f"{name} gradients, divisor {divisor}: vNMSE"
            if expected:
                yield near(what, found, expected, 0.02)
            else:
                yield close(what, found, expected, 1e-9)
    yield _crossover(own, torch.randn(n, generator=draw))
    yield _all_shifts(own)
    yield from _many_ranks(quick)


def _crossover(noise: Sequence[Tensor], common: Tensor) -> Check:
    """Find ||mu||^2 / E||e||^2 at which both divisors err alike, between two points around it."""
    energy = sum(float(e.double().square().sum()) for e in noise) / len(noise)
    unit = common * (energy**0.5 / float(common.double().norm()))
    expected = 1 / (RANKS - SKIP)
    points = []
    for q in (0.8 * expected, 1.2 * expected):
        grads = [q**0.5 * unit + e for e in noise]
        mean = mean_of(grads)
        errors = [
            vnmse(virtual_step(ring(SKIP, d), grads).mean, mean) * float(mean.square().sum())
            for d in ("skip", "drop")
        ]
        points.append((q, errors[0] - errors[1]))
    (low, at_low), (high, at_high) = points
    found = low - at_low * (high - low) / (at_high - at_low)
    return near("signal-to-noise ratio at which skip and drop err alike", found, expected, 0.02)


def _all_shifts(grads: Sequence[Tensor]) -> Check:
    """Average the result over every rotation: each rank's slice is left out equally often."""
    build = SCHEDULES.get("ring").build
    total = torch.zeros_like(grads[0], dtype=torch.float64)
    for shift in range(RANKS):
        payloads = [g.double() / RANKS for g in grads]
        schedules = [build(rank, RANKS, skip=SKIP, shift=shift) for rank in range(RANKS)]
        run_schedules(payloads, schedules)
        total += payloads[0]
    expected = (RANKS - SKIP) / RANKS * mean_of(grads)
    error = float((total / RANKS - expected).abs().max())
    return at_most("mean over all rotations less (N - S)/N gbar, largest element", error, 1e-12)


def _many_ranks(quick: bool) -> Iterator[Check]:
    """The error depends on S/N alone; schedules straight, since small payloads are spared."""
    build = SCHEDULES.get("ring").build
    n = 1 << 16
    for ranks in (64,) if quick else (64, MOST_RANKS):
        schedules = [build(rank, ranks, skip=ranks // 2) for rank in range(ranks)]
        grads = torch.randn(ranks, n, generator=torch.Generator().manual_seed(ranks))
        for name, source, expected in (
            ("independent", grads, 0.5),
            ("identical", grads[:1].expand(ranks, -1), 0.25),
        ):
            payloads = list(source / ranks)
            run_schedules(payloads, schedules)
            found = vnmse(payloads[0], source.double().mean(0))
            yield near(
                f"{ranks} ranks, half skipped, {name} gradients: vNMSE", found, expected, 0.02
            )


CLAIMS = (
    Claim("T7", "A ring that skips S steps takes 2 (N - 1) - S, 1.4 times less at half of 8",
          "paper", "by model", _steps),
    Claim("T8", "What skipping costs in error, by divisor, and where the better divisor changes",
          "derived", "measured", _error),
)  # fmt: skip

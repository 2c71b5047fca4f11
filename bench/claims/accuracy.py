"""Claims about accuracy: small trainings on virtual ranks, three seeds each.

Where a claim says that the learning rate was tuned anew, each method gets the rate of a grid at
which samples held out of training are classified best; the test samples play no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from scipy.stats import spearmanr

from bench.claims.checks import SEEDS, Claim, Figure, Finding, at_least, at_most, factor, near
from bench.claims.errors import mean_of, vnmse
from bench.claims.selection import artopk
from bench.claims.skipping import ring
from bench.claims.training import Job, mean_accuracy, trained
from gradpilot.protos.messages import BF16, DENSE, Option
from gradpilot.worker_agent.virtual import virtual_step

RANKS = 8
RATIOS = (0.1, 0.033, 0.011, 0.004, 0.001)
"""Candidates of the published search."""

NOISE = 0.5
"""Points by which two means over three seeds may differ by chance."""


def published(quick: bool) -> Job:
    """Return a job with the published batch, rate and momentum of ResNet18 on a small network."""
    return Job(RANKS, 30 if quick else 400, 32, rate=0.1, momentum=0.1)


def seeds(quick: bool) -> Sequence[int]:
    """Return the seeds to train with."""
    return SEEDS[:1] if quick else SEEDS


def topk(ratio: float) -> Option:
    """Return the option top-k."""
    return Option("topk", ratio, "allgather")


# --- T9: skipping where every rank knows one class only -------------------------------------------

SKIP = 2  # a quarter of eight ranks
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2)

_CLASSES_LEFT_OUT = (
    "Every step leaves two of the eight classes out of each part of the gradient, other ones every"
    " time. Twice as many steps do not help; where all ranks hold all classes, a quarter skipped"
    " costs a few tenths of a point. See the figures beside it."
)


def one_class(quick: bool, rate: float, times: int = 1) -> Job:
    """Return a job in which every rank holds one class; ``times`` as many steps."""
    steps = 30 if quick else 300 * times
    return Job(RANKS, steps, 16, rate=rate, momentum=0.9, one_class=True)


def _one_class(quick: bool) -> Iterator[Finding]:
    found = {}
    for name, option in (
        ("all-reduce", DENSE),
        ("random", ring(SKIP)),
        ("static", ring(SKIP, rotation="static")),
    ):
        jobs = [one_class(quick, rate) for rate in (RATES[2:3] if quick else RATES)]

        def held_out(job: Job, option: Option = option) -> float:
            return sum(trained(job, option, seed).held_out for seed in seeds(quick))

        best = max(jobs, key=held_out)
        found[name] = mean_accuracy(best, option, seeds(quick))
        yield Figure(f"{name}: accuracy at its best rate, %", found[name])
        yield Figure(f"{name}: its best rate", best.rate)
        spread = [100 * trained(best, option, seed).accuracy for seed in seeds(quick)]
        yield Figure(f"{name}: range over seeds, points", max(spread) - min(spread))
    gap = found["all-reduce"] - found["random"]
    yield at_least("random less static, points", found["random"] - found["static"], 0.0)
    yield at_most("all-reduce less random, points", gap, 2.0, _CLASSES_LEFT_OUT)
    longer = one_class(quick, RATES[2], times=2)
    all_reduce, random = (mean_accuracy(longer, o, seeds(quick)) for o in (DENSE, ring(SKIP)))
    yield Figure("twice as many steps: all-reduce less random, points", all_reduce - random)
    yield from _skipping_on_many(quick)


def _skipping_on_many(quick: bool) -> Iterator[Finding]:
    """Split the same batch over more and more ranks, a quarter of the steps skipped."""
    for ranks in (8,) if quick else (8, 32, 128):
        job = Job(ranks, 30 if quick else 200, 1024 // ranks, rate=0.05, momentum=0.9)
        dense, less = (mean_accuracy(job, o, SEEDS[:1]) for o in (DENSE, ring(ranks // 4)))
        what = f"{ranks} ranks, 1024 samples a step, all classes, a quarter skipped"
        yield Figure(f"{what}: accuracy less that of all-reduce, points", less - dense)


# --- T14: sixteen bits ----------------------------------------------------------------------------


def _sixteen_bits(quick: bool) -> Iterator[Finding]:
    n = 1 << (16 if quick else 20)
    grads = list(torch.randn(RANKS, n, generator=torch.Generator().manual_seed(0)))
    mean = mean_of(grads)
    full = sum(r.bytes for r in virtual_step(DENSE, grads).wire)
    for option, expected in ((Option("fp16"), 2.5e-7), (BF16, 1.6e-5)):
        step = virtual_step(option, grads)
        name = option.compressor
        yield factor(f"{name}, 8 ranks: vNMSE", vnmse(step.mean, mean), expected, 2)
        bytes_of = sum(r.bytes for r in step.wire)
        yield near(f"{name}: bytes over those of fp32", bytes_of / full, 0.5, 0.001)
    job = published(quick)
    dense = mean_accuracy(job, DENSE, seeds(quick))
    for option in (Option("fp16"), BF16):
        loss = dense - mean_accuracy(job, option, seeds(quick))
        yield at_most(f"fp32 less {option.compressor}: accuracy, points", loss, NOISE)


# --- T15: ratio and accuracy ----------------------------------------------------------------------


def _ratios(quick: bool) -> Iterator[Finding]:
    job, runs = published(quick), seeds(quick)
    dense = mean_accuracy(job, DENSE, runs)
    yield Figure("dense: accuracy, %", dense)
    pooled: list[tuple[float, float]] = []
    for name, make in (("star", lambda ratio: artopk("star", ratio)), ("topk", topk)):
        points = []
        for ratio in (RATIOS[0], RATIOS[-1]) if quick else RATIOS:
            gains = [trained(job, make(ratio), seed).gain for seed in runs]
            points.append((sum(gains) / len(gains), mean_accuracy(job, make(ratio), runs)))
            yield Figure(f"{name}, top {100 * ratio:g} %: accuracy, %", points[-1][1])
            yield Figure(f"{name}, top {100 * ratio:g} %: gain", points[-1][0])
        if name == "star":
            yield at_most("dense less star at 10 %, points", dense - points[0][1], 0.7)
            over = points[-1][1] - points[0][1]
            yield at_most("star at 0.1 % less star at 10 %, points", over, NOISE)
        order = float(spearmanr(*zip(*points, strict=True)).statistic)
        yield at_least(f"{name}: rank correlation of gain and accuracy", order, 0.8)
        pooled += points
    order = float(spearmanr(*zip(*pooled, strict=True)).statistic)
    yield Figure("both families together: rank correlation of gain and accuracy", order)
    yield from _momentum(quick)
    yield from _star_on_many(quick)


def _momentum(quick: bool) -> Iterator[Finding]:
    """The published momentum is low; the usual one amplifies what error feedback sends late."""
    job = Job(RANKS, 30 if quick else 400, 32, rate=0.05, momentum=0.9)
    dense = mean_accuracy(job, DENSE, seeds(quick))
    for ratio in (0.1,) if quick else (0.1, 0.01):
        loss = dense - mean_accuracy(job, artopk("star", ratio), seeds(quick))
        yield Figure(f"momentum 0.9: dense less star at {100 * ratio:g} %, points", loss)


def _star_on_many(quick: bool) -> Iterator[Finding]:
    """Split the same batch over more and more ranks: what is not selected waits longer."""
    for ranks in (8,) if quick else (8, 64, 1024):
        job = Job(ranks, 20 if quick else 100, 1024 // ranks, rate=0.1, momentum=0.1, hidden=16)
        dense, star = (trained(job, option, 0) for option in (DENSE, artopk("star", 0.1)))
        what = f"{ranks} ranks, 1024 samples a step, star at 10 %"
        loss = 100 * (dense.accuracy - star.accuracy)
        yield Figure(f"{what}: dense less it, points", loss)
        yield Figure(f"{what}: gain", star.gain)
        yield Figure(f"{what}: ||residual||^2 over ||gradient||^2", star.residual)


CLAIMS = (
    Claim("T9", "Rotating what is skipped matters where ranks hold different classes", "paper",
          "measured", _one_class),
    Claim("T14", "Sixteen bits halve the bytes and cost no accuracy", "derived", "measured",
          _sixteen_bits),
    Claim("T15", "AR-Topk at 10 % costs little accuracy, and gain orders the ratios", "paper",
          "measured", _ratios),
)  # fmt: skip

"""Claims about what top-k compressors select: sources of AR-Topk, and the gain of a ratio."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from scipy.stats import chisquare
from torch import Tensor

from bench.claims.checks import Check, Claim, Finding, at_most, exactly, near
from gradpilot.protos.messages import Option, Setting
from gradpilot.worker_agent.collectives.base import Broadcast
from gradpilot.worker_agent.compressors.base import At, Compressor, Estimate, Rounds, create
from gradpilot.worker_agent.statistics import gain, squared_norm
from gradpilot.worker_agent.virtual import run_lockstep, virtual_step

RATIOS = (0.1, 0.01, 0.001)
GAINS = {"normal": (0.4393, 0.0845, 0.0127), "Laplace": (0.5954, 0.1621, 0.0318)}
TOLERANCES = (0.01, 0.03, 0.10)
"""Wider where fewer elements are kept."""

MOST_RANKS = 1024


def artopk(selection: str, ratio: float) -> Option:
    """Return the option AR-Topk with a way to choose its source, over the backend."""
    return Option("artopk", ratio, settings=(Setting("selection", selection),))


def watch(rounds: Rounds, sources: list[int]) -> Rounds:
    """Pass rounds through and note the source of every broadcast."""
    request = next(rounds)
    while True:
        if isinstance(request, Broadcast):
            sources.append(request.source)
        reply = yield request
        try:
            request = rounds.send(reply)
        except StopIteration as stop:
            estimate: Estimate = stop.value
            return estimate


def sources_of(compressor: Compressor, grads: Sequence[Sequence[Tensor]]) -> list[int]:
    """Return which rank every step's indices came from; ``grads`` by step, then by rank."""
    sources: list[int] = []
    for step, of_ranks in enumerate(grads):
        ats = [At(rank, len(of_ranks), step) for rank in range(len(of_ranks))]
        rounds = [compressor.rounds(g, at) for g, at in zip(of_ranks, ats, strict=True)]
        rounds[0] = watch(rounds[0], sources)
        run_lockstep(rounds, ats)
    return sources


def _uneven(sources: Sequence[int], ranks: int) -> int:
    counts = Counter(sources)
    return max(counts[r] for r in range(ranks)) - min(counts[r] for r in range(ranks))


def _sources(quick: bool) -> Iterator[Finding]:
    star, var = create(artopk("star", 0.05)), create(artopk("var", 0.05))
    draw = torch.Generator().manual_seed(0)
    for ranks in (8,) if quick else (8, 64):
        steps = 5 * ranks + 3
        grads = [list(torch.randn(ranks, 256, generator=draw)) for _ in range(steps)]
        spread = _uneven(sources_of(star, grads), ranks)
        yield at_most(f"star, {ranks} ranks, {steps} steps: greatest less least count", spread, 1)

    # The source of ``star`` is asked for in a rank's first request, so one rank tells.
    steps = 2 * MOST_RANKS + 3
    sources = []
    for step in range(steps):
        first = next(star.rounds(torch.ones(64), At(0, MOST_RANKS, step)))
        assert isinstance(first, Broadcast)
        sources.append(first.source)
    spread = _uneven(sources, MOST_RANKS)
    yield at_most(f"star, {MOST_RANKS} ranks, {steps} steps: greatest less least count", spread, 1)

    ranks, steps = 8, 200
    scale = torch.linspace(0.9, 1.1, ranks)[:, None]  # skewed: gradients of some ranks are larger
    grads = [list(torch.randn(ranks, 256, generator=draw) * scale) for _ in range(steps)]
    counts = Counter(sources_of(var, grads))
    p = float(chisquare([counts[r] for r in range(ranks)]).pvalue)
    what = f"var, {ranks} ranks of unequal scale, {steps} steps: p of a uniform source"
    yield at_most(what, p, 0.01)
    yield from _served(quick)


def _served(quick: bool) -> Iterator[Finding]:
    """Under ``star`` what a rank keeps among its k largest is sent within N steps."""
    for ranks in (8, 64) if quick else (8, 64, 256):
        n, k = 4 * ranks, 4
        # Every rank has one element that outweighs all else it ever holds.
        grads = list(0.01 * torch.randn(ranks, n, generator=torch.Generator().manual_seed(1)))
        for rank, grad in enumerate(grads):
            grad[rank] = 10.0
        waiting, longest = [0] * ranks, 0
        residuals: list[Tensor] | None = None
        for step in range(2 * ranks):
            done = virtual_step(artopk("star", k / n), grads, residuals, step=step)
            residuals = done.residuals
            for rank in range(ranks):
                kept_back = float(residuals[rank][rank]) != 0.0
                waiting[rank] = waiting[rank] + 1 if kept_back else 0
                longest = max(longest, waiting[rank])
        what = f"star, {ranks} ranks: most steps that a rank's largest element waits"
        yield at_most(what, longest, ranks - 1)


def _gain(quick: bool) -> Iterator[Check]:
    n = 1_000_000
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(n, generator=draw)
    uniform = torch.rand(n, generator=draw, dtype=torch.float64) - 0.5
    laplace = (uniform.sign() * -torch.log1p(-2 * uniform.abs())).float()
    for name, x in (("normal", normal), ("Laplace", laplace)):
        total = squared_norm(x)
        for ratio, expected, share in zip(RATIOS, GAINS[name], TOLERANCES, strict=True):
            step = virtual_step(Option("topk", ratio, "allgather"), [x])
            found = gain(step.estimates[0].sent, total)
            yield near(f"{name}, top {100 * ratio:g} %: gain", found, expected, share)
    ladder = [1e-4 * 10 ** (i / 4) for i in range(17)]
    gains = []
    for ratio in ladder:
        step = virtual_step(Option("topk", min(ratio, 1.0), "allgather"), [laplace])
        gains.append(gain(step.estimates[0].sent, squared_norm(laplace)))
    falls = sum(b < a for a, b in itertools.pairwise(gains))
    outside = sum(not 0 < g <= 1 or math.isnan(g) for g in gains)
    yield exactly(f"falls of the gain over {len(ladder)} growing ratios", falls, 0)
    yield exactly("gains outside (0, 1]", outside, 0)


CLAIMS = (
    Claim("T5", "Star takes every rank as the source equally often, var does not",
          "paper", "measured", _sources),
    Claim("T6", "Gain grows with the ratio and has known values on independent elements",
          "derived", "measured", _gain),
)  # fmt: skip

"""One step after another of a job on N ranks over a link that changes.

Every rank computes at its own pace; a collective starts when the last rank is there, so of the N
ranks only the earliest, the middle and the latest matter, and these are drawn once for blocks of
steps, the same under every plan. What a step costs then follows bucket by bucket, for many steps at
once. Shapes: S steps, N ranks, B buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from gradpilot.simulate.traces import Link
from gradpilot.simulate.world import Costs, World

Floats = NDArray[np.float64]

BLOCK = 64
"""Steps whose randomness is drawn together."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far reality is from the model; all zero for none.

    Attributes:
        wire: Standard deviation of the logarithm of a bucket's wire time.
        hiccups: Share of buckets' wire times that are ``HICCUP`` times as long.
        compute: The same as ``wire`` for the compute time of a rank in a step.
        skew: The same for the pace that a rank keeps for the whole job.
        stalls: Share of steps of a rank that stall, each for ``STALL`` of the compute time.
        measured: The same as ``wire`` for what agents measure of compressors and gradients.
    """

    wire: float = 0.05
    hiccups: float = 0.01
    compute: float = 0.02
    skew: float = 0.02
    stalls: float = 0.0005
    measured: float = 0.05


HICCUP, STALL = 4.0, 0.5

QUIET = Noise(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Block:
    """The randomness of ``BLOCK`` steps.

    Attributes:
        first: When the first rank has each bucket ready, seconds from the step's begin, (S, B).
        middle: The same of the median rank.
        last: The same of the last rank.
        wire: Factor on wire times, (S, B).
        compute: Compute seconds of a step: least, median and most over ranks of their medians.
    """

    first: Floats
    middle: Floats
    last: Floats
    wire: Floats
    compute: tuple[float, float, float]


class Weather:
    """The randomness of a job: the same for every plan, whatever is asked first.

    Args:
        world: The job and its ranks.
        noise: How much of it.
        seed: Seed.
    """

    def __init__(self, world: World, noise: Noise, seed: int) -> None:
        self._world, self._noise, self._seed = world, noise, seed
        draw = np.random.default_rng([seed, 10])
        self._pace = np.exp(noise.skew * draw.standard_normal(world.ranks))
        self._blocks: dict[int, Block] = {}

    def block(self, number: int) -> Block:
        """Return the steps from ``number * BLOCK`` on."""
        if number not in self._blocks:
            self._blocks[number] = self._draw(number)
        return self._blocks[number]

    def _draw(self, number: int) -> Block:
        job, noise, ranks = self._world.job, self._noise, self._world.ranks
        draw = np.random.default_rng([self._seed, 11, number])
        shape = (BLOCK, len(job.ready_seconds))
        wire = np.exp(noise.wire * draw.standard_normal(shape))
        wire = np.where(draw.random(shape) < noise.hiccups, HICCUP * wire, wire)
        pace = self._pace * np.exp(noise.compute * draw.standard_normal((BLOCK, ranks)))
        stalls = draw.random((BLOCK, ranks)) < noise.stalls
        lost = STALL * job.compute_seconds * stalls
        offsets = job.lead_seconds + np.array(job.ready_seconds)
        parts: tuple[list[Floats], ...] = ([], [], [])
        for offset in offsets:
            ready = pace * offset + lost
            parts[0].append(ready.min(axis=1))
            parts[1].append(np.median(ready, axis=1))
            parts[2].append(ready.max(axis=1))
        own = np.median(pace * offsets.max() + lost, axis=0)
        first, middle, last = (np.stack(part, axis=1) for part in parts)
        spread = (float(own.min()), float(np.median(own)), float(own.max()))
        return Block(first, middle, last, wire, spread)


@dataclass(frozen=True, slots=True)
class Steps:
    """What became of S steps under one plan.

    Attributes:
        link: The link meanwhile.
        seconds: Duration of each, (S,).
        wire: Seconds per bucket that collectives took on the link, (S, B).
        waits: Seconds per bucket that the earliest, the median and the latest rank spent in the
            bucket's first collective before it could begin, (3, S, B).
        beside: Seconds per bucket that its collective was under way beside the one before, which
            ``wire`` does not hold, (S, B).
    """

    link: Link
    seconds: Floats
    wire: Floats
    waits: Floats
    beside: Floats

    def cut(self, steps: int) -> Steps:
        """Return the first of them."""
        return Steps(
            self.link,
            self.seconds[:steps],
            self.wire[:steps],
            self.waits[:, :steps],
            self.beside[:steps],
        )


def run_steps(costs: Costs, rows: NDArray[np.intp], link: Link, block: Block) -> Steps:
    """Carry out the steps of a block, or some of them, under one plan.

    Args:
        costs: Of all options.
        rows: Which option each bucket gets, (B,).
        link: The link during these steps.
        block: Their randomness.
    """
    column = np.arange(len(rows))
    compress, decompress = costs.compress[rows, column], costs.decompress[rows, column]
    latency = costs.alphas[rows, column] * link.alpha * block.wire
    transfer = costs.pushed[rows, column] * link.beta * block.wire
    work = (compress, decompress, latency, transfer, block)
    if bool(costs.native[rows].all()):
        return Steps(link, *_in_flight(*work, costs.at_once))
    return Steps(link, *_in_turn(*work))


def _in_turn(
    compress: Floats, decompress: Floats, latency: Floats, transfer: Floats, block: Block
) -> tuple[Floats, Floats, Floats, Floats]:
    """The communication thread: a bucket begins when the one before is finished."""
    wire = latency + transfer
    waits = np.empty((3, *wire.shape))
    end = np.zeros(len(wire))
    for b in range(wire.shape[1]):
        begin = np.maximum(end, block.last[:, b])
        for i, ready in enumerate((block.first, block.middle, block.last)):
            waits[i, :, b] = begin - np.maximum(end, ready[:, b])
        end = begin + compress[b] + wire[:, b] + decompress[b]
    return np.maximum(end, block.last.max(axis=1)), wire, waits, np.zeros_like(wire)


def _in_flight(
    compress: Floats, decompress: Floats, latency: Floats, transfer: Floats, block: Block, many: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """All buckets native: ``many`` are under way at once, see ``policies.timeline.wire_end``.

    What a bucket took by itself is counted as agents count it: from its turn, or from the end of
    the one before if that was later.
    """
    shape = latency.shape
    busy, beside, waits = np.empty(shape), np.empty(shape), np.empty((3, *shape))
    free, end = np.zeros(shape[0]), np.zeros(shape[0])
    done = [np.zeros(shape[0])] * many
    for b in range(shape[1]):
        handed, before = block.last[:, b] + compress[b], done[-1]
        begin = np.maximum(handed, done[0])
        free = np.maximum(free, begin) + transfer[:, b]
        now = np.maximum(free + latency[:, b], before)
        end = np.maximum(end, now + decompress[b])
        busy[:, b] = now - np.maximum(begin, before)
        beside[:, b] = np.maximum(before - begin, 0.0)
        for i, ready in enumerate((block.first, block.middle, block.last)):
            since = np.maximum(ready[:, b] + compress[b], before)
            waits[i, :, b] = np.maximum(handed, before) - since
        done = [*done[1:], now]
    return np.maximum(end, block.last.max(axis=1)), busy, waits, beside


def step_seconds(costs: Costs, link: Link, block: Block) -> Floats:
    """Return the seconds of every step under every option given to all buckets, (K, S)."""
    shape = (len(costs.native), len(block.wire))
    turn, free, last = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    done = [np.zeros(shape)] * costs.at_once
    for b in range(block.wire.shape[1]):
        noise = block.wire[:, b]
        compress, decompress = costs.compress[:, b, None], costs.decompress[:, b, None]
        latency = np.outer(costs.alphas[:, b] * link.alpha, noise)
        transfer = np.outer(costs.pushed[:, b] * link.beta, noise)
        turn = np.maximum(turn, block.last[:, b]) + compress + latency + transfer + decompress
        free = np.maximum(free, np.maximum(done[0], block.last[:, b] + compress)) + transfer
        done = [*done[1:], np.maximum(done[-1], free + latency)]
        last = np.maximum(last, done[-1] + decompress)
    end = np.where(costs.native[:, None], last, turn)
    return np.asarray(np.maximum(end, block.last.max(axis=1)))


def part(block: Block, first: int, last: int) -> Block:
    """Return the steps ``first .. last - 1`` of a block."""
    cut = partial(_rows, first=first, last=last)
    return Block(
        cut(block.first), cut(block.middle), cut(block.last), cut(block.wire), block.compute
    )


def _rows(values: Floats, first: int, last: int) -> Floats:
    return values[first:last]

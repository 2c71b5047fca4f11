"""What the agents of a simulated job would tell the controller.

Of N ranks three speak: the one that was first at a collective, the median one and the last one. The
controller takes minimum, median and maximum over ranks, and those are the same. (Of two ranks both
speak.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.cost import coefficients
from gradpilot.policies.gain import skip_gain
from gradpilot.protos.messages import (
    BucketReport,
    ComputeSample,
    Counters,
    Option,
    Plan,
    Report,
    WireSample,
)
from gradpilot.simulate.engine import Noise, Steps
from gradpilot.simulate.traces import Link
from gradpilot.simulate.world import Round, World

Floats = NDArray[np.float64]

MOST_SAMPLES = 64
"""Collectives that one report lists."""

SAMPLED_BLOCK, SAMPLED_STEPS, FRESH_STEPS = 32, 4, 16
"""Of every block of steps the collectives of the first few are kept, and of the first steps after a
change."""

ROWS = 32
"""Newest steps of a window that medians are taken over."""

PROBE_REPETITIONS = 3
TINY = 1e-12


@dataclass(slots=True)
class Window:
    """Steps under one plan since the last report.

    Attributes:
        first: Number of the first step.
        parts: What became of them, in pieces.
        compute: See ``engine.Block``, newest.
        fresh_until: Steps before this one are all sampled.
    """

    first: int
    fresh_until: int
    parts: list[Steps]
    compute: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def steps(self) -> int:
        """Return how many steps it has."""
        return sum(len(part.seconds) for part in self.parts)


class Reporter:
    """Makes reports.

    Args:
        world: The job.
        noise: Of what is measured.
        seed: Seed.
    """

    def __init__(self, world: World, noise: Noise, seed: int) -> None:
        self._world, self._noise = world, noise
        self._draw = np.random.default_rng([seed, 20])
        self.speakers = min(world.ranks, 3)
        self._sequence = 0
        self._probe: tuple[WireSample, ...] = ()

    def calibration(self) -> tuple[ComputeSample, ...]:
        """Return what the agents measured of their compressors at the start."""
        return tuple(
            replace(
                sample,
                compress_seconds=sample.compress_seconds * self._error(),
                decompress_seconds=sample.decompress_seconds * self._error(),
            )
            for sample in self._world.calibration
        )

    def probe(self, step: int, sizes: Sequence[int], link: Link) -> float:
        """Time collectives of two sizes on all ranks; return the seconds that it takes them."""
        samples: list[WireSample] = []
        total = 0.0
        for size in sizes:
            for _ in range(PROBE_REPETITIONS):
                a, b = coefficients("all_reduce", self._world.ranks, 0, self._world.backend)
                factor = float(np.exp(self._noise.wire * self._draw.standard_normal()))
                seconds = (a * link.alpha + b * size * link.beta) * factor
                samples.append(WireSample(step, -1, len(samples), "all_reduce", size, 0, seconds))
                total += seconds
        self._probe = tuple(samples)
        return total

    def reports(
        self,
        window: Window,
        plan: Plan,
        options: tuple[Option, ...],
        compression: tuple[Floats, Floats],
        progress: float,
    ) -> tuple[Report, ...]:
        """Return the report of every rank that speaks.

        Args:
            window: Steps under one plan, at least one.
            plan: That plan.
            options: Option of every bucket under it.
            compression: Compress and decompress seconds of every bucket.
            progress: Share of the training that is done.
        """
        seconds = np.concatenate([part.seconds for part in window.parts])
        wire = np.concatenate([part.wire for part in window.parts])
        waits = np.concatenate([part.waits for part in window.parts], axis=1)
        buckets = self._buckets(options, compression, wire[-ROWS:], waits[:, -ROWS:], progress)
        interval = plan.interval if plan.id else SAMPLED_BLOCK
        samples = self._samples(window, options, min(SAMPLED_BLOCK, interval))
        probe, self._probe = self._probe, ()
        took = float(np.median(seconds[-ROWS:]))
        self._sequence += 1
        made = []
        for speaker in range(self.speakers):
            which = speaker if self.speakers == 3 else 2 * speaker  # two ranks: first and last
            # The middle one of three: who is first waits most, who is last not at all.
            compute = min(window.compute[which], took)
            made.append(
                Report(
                    layout=self._world.job.layout.digest,
                    sequence=self._sequence,
                    first_step=window.first,
                    last_step=window.first + len(seconds) - 1,
                    plan_term=plan.term,
                    plan_id=plan.id,
                    step_seconds=took,
                    compute_seconds=compute,
                    exposed_seconds=took - compute,
                    samples=(*samples[which], *probe),
                    buckets=buckets[which],
                    counters=Counters(steps=window.first + len(seconds)),
                )
            )
        return tuple(made)

    def _samples(
        self, window: Window, options: tuple[Option, ...], block: int
    ) -> list[tuple[WireSample, ...]]:
        """Return the collectives of sampled steps as the three ranks saw them."""
        rounds = self._world.rounds(options)
        places, step = [], window.first
        for part in window.parts:
            for i in range(len(part.seconds)):
                if step % block < SAMPLED_STEPS or step < window.fresh_until:
                    places += [(part, i, step, one) for one in rounds]
                step += 1
        if len(places) > MOST_SAMPLES:
            chosen = self._draw.choice(len(places), MOST_SAMPLES, replace=False)
            places = [places[k] for k in sorted(chosen)]
        found: list[list[WireSample]] = [[], [], []]
        for part, i, step, one in places:
            b = one.bucket
            alone = [r for r in rounds if r.bucket == b]
            share = _seconds(one, part.link) / max(sum(_seconds(r, part.link) for r in alone), TINY)
            number = alone.index(one)
            for which in range(3):
                waited = part.waits[which, i, b] if number == 0 else 0.0
                seconds = float(part.wire[i, b] * share + waited)
                beside = float(part.beside[i, b]) if number == 0 else 0.0
                found[which].append(
                    WireSample(
                        step, b, number, one.collective, one.bytes, one.skip, seconds, beside
                    )
                )
        return [tuple(samples) for samples in found]

    def _buckets(
        self,
        options: tuple[Option, ...],
        compression: tuple[Floats, Floats],
        wire: Floats,
        waits: Floats,
        progress: float,
    ) -> list[tuple[BucketReport, ...]]:
        """Return the bucket reports of the three ranks."""
        rounds = self._world.rounds(options)
        job, ranks = self._world.job, self._world.ranks
        compress, decompress = compression
        taken = np.median(wire + waits, axis=1)  # (3, B)
        found: list[list[BucketReport]] = [[], [], []]
        for b, option in enumerate(options):
            seen = job.gradients.seen(option.family, option.ratio, progress, ranks)
            heard = skip_gain(option.collective, ranks, option.skip)
            squares = [float(x[b]) for x in (seen.gradient_sq, seen.residual_sq, seen.mean_sq)]
            gain = float(seen.gain[b])
            if gain < 1:
                gain = min(gain * self._error(), 1.0)
            energy = np.minimum(seen.energy[b] ** self._error(), 1.0)
            common = BucketReport(
                bucket=b,
                ready_seconds=job.ready_seconds[b],
                compress_seconds=float(compress[b]) * self._error(),
                decompress_seconds=float(decompress[b]) * self._error(),
                wire_seconds=0.0,
                wire_bytes=sum(r.bytes for r in rounds if r.bucket == b),
                gain=gain * heard,
                gradient_sq=squares[0] * self._error(),
                residual_sq=squares[1] * self._error(),
                energy=tuple(float(x) for x in energy),
                mean_sq=squares[2] * self._error(),
            )
            for which in range(3):
                found[which].append(replace(common, wire_seconds=float(taken[which, b])))
        return [tuple(reports) for reports in found]

    def _error(self) -> float:
        """Return the factor by which one measurement is off."""
        return float(np.exp(self._noise.measured * self._draw.standard_normal()))


def _seconds(one: Round, link: Link) -> float:
    return one.alphas * link.alpha + one.pushed * link.beta

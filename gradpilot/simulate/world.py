"""The truth of a simulated job: what every option costs and is worth, whatever a policy believes.

Costs are affine in the link, so they are kept as counts of latencies and of bytes pushed and serve
for every link. Shapes: K options, B buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradpilot.errors import ConfigError
from gradpilot.policies.base import PolicySettings
from gradpilot.policies.compute import ComputeModel, bracket
from gradpilot.policies.cost import at_once, carried_by, coefficients
from gradpilot.policies.gain import SMALLEST, efficiency, skip_efficiency, skip_gain
from gradpilot.policies.options import (
    Head,
    Ladder,
    carriers,
    make_heads,
    ratio_grid,
    sum_rounds,
)
from gradpilot.policies.timeline import step_seconds, wire_end
from gradpilot.protos.messages import BF16, DENSE, Family, Option
from gradpilot.simulate.catalog import compute_samples, families
from gradpilot.simulate.jobs import Job
from gradpilot.simulate.traces import Link

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST_SKIPS = 9
"""Skip counts of one collective that are tried where every one would be too many."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What options cost, (K, B) unless said otherwise.

    Attributes:
        compress: Seconds before the wire.
        decompress: Seconds after it.
        alphas: Latencies.
        pushed: Bytes that occupy the wire, as many as take beta each.
        native: Whether buckets may be in flight at once, (K,).
        at_once: How many of them are then.
    """

    compress: Floats
    decompress: Floats
    alphas: Floats
    pushed: Floats
    native: Bools
    at_once: int


@dataclass(frozen=True, slots=True)
class Round:
    """One collective of one bucket: a * alpha + b * bytes * beta seconds."""

    bucket: int
    collective: str
    bytes: int
    skip: int
    alphas: float
    pushed: float


class World:
    """A job on N ranks.

    Args:
        job: The model.
        ranks: Ranks N.
        backend: Whose collectives carry the gradients; see ``policies.cost``.
        sequential: Whether buckets go one after another even under a native plan.
    """

    def __init__(
        self, job: Job, ranks: int, backend: str = "gloo", *, sequential: bool = False
    ) -> None:
        if not 2 <= ranks <= 4096:
            raise ConfigError(f"ranks must be 2 .. 4096, got {ranks}")
        self.job, self.ranks, self.backend, self.sequential = job, ranks, backend, sequential
        self.families = families(job.layout, ranks)
        self.calibration = compute_samples(ranks, job.device_scale)
        self._compute = ComputeModel(self.calibration)
        self._known = {(f.compressor, f.settings): f for f in self.families}
        self._ladders = {key: sum_rounds(family) for key, family in self._known.items()}

    # --- options ---------------------------------------------------------------------------------

    def options(self, settings: PolicySettings) -> tuple[Option, ...]:
        """Return what a clairvoyant may give all buckets: the options of the policies' own grid.

        Of many skips only some are tried.
        """
        heads = make_heads(
            self.families, self.ranks, settings.ratios, skips=True, collectives=settings.collectives
        )
        skips: dict[tuple[int, str], list[int]] = {}
        for head in heads:
            skips.setdefault((id(head.family), head.collective), []).append(head.skip)
        found = []
        for head in heads:
            known = skips[id(head.family), head.collective]
            tried = np.linspace(0, len(known) - 1, min(MOST_SKIPS, len(known))).round()
            if known.index(head.skip) in tried:
                grid = ratio_grid(self._ladder(head.family).ratios, settings.ratios)
                found += [head.family.option(float(r), head.collective, head.skip) for r in grid]
        return tuple(found)

    def family(self, option: Option) -> Family:
        """Return the family of an option.

        Raises:
            ConfigError: The agents have none such, or it cannot be carried that way.
        """
        family = self._known.get(option.family)
        if family is None or option.collective not in family.collectives:
            raise ConfigError(f"the simulated agents cannot do {option.label}")
        return family

    def _ladder(self, family: Family) -> Ladder:
        return self._ladders[family.compressor, family.settings]

    # --- costs -----------------------------------------------------------------------------------

    def costs(self, options: tuple[Option, ...]) -> Costs:
        """Return what options cost on every bucket."""
        rows = [self._costs(option) for option in options]
        compress, decompress, alphas, pushed = (np.stack([r[i] for r in rows]) for i in range(4))
        native = np.array([self._native(option) for option in options])
        return Costs(compress, decompress, alphas, pushed, native, at_once(self.backend))

    def _costs(self, option: Option) -> tuple[Floats, Floats, Floats, Floats]:
        family = self.family(option)
        ratio = np.array([option.ratio])
        compress, decompress = self._compute.seconds(option.family, ratio, self.job.elements)
        counts, sizes = self._rounds(option)
        a, b = carriers(Head(family, option.collective, option.skip), self.ranks, self.backend)
        return compress[0], decompress[0], counts @ a, sizes @ b

    def _rounds(self, option: Option) -> tuple[Floats, Floats]:
        """Return number and bytes of rounds per bucket and kind, as ``policies.options`` sums."""
        ladder = self._ladder(self.family(option))
        low, high, share = bracket(ladder.ratios, np.array([option.ratio]))
        i, j, part = int(low[0]), int(high[0]), float(share[0])
        return (
            ladder.counts[i] + part * (ladder.counts[j] - ladder.counts[i]),
            ladder.sizes[i] + part * (ladder.sizes[j] - ladder.sizes[i]),
        )

    def _native(self, option: Option) -> bool:
        single = self._ladder(self.family(option)).single_round
        return option.collective == "native" and single and not self.sequential

    def rounds(self, options: tuple[Option, ...]) -> list[Round]:
        """Return every collective of a step under a plan, in order; one option per bucket."""
        found = []
        for b, option in enumerate(options):
            family = self.family(option)
            shape = family.ladder[0].buckets[b].rounds
            for number, wire_round in enumerate(shape):
                size = self._round_bytes(family, option.ratio, b, number)
                name = carried_by(wire_round.collective, option.collective)
                skips = wire_round.collective == "all_reduce" and wire_round.skippable
                skip = option.skip if skips else 0
                alphas, payloads = coefficients(name, self.ranks, skip, self.backend)
                found.append(Round(b, name, size, skip, alphas, payloads * size))
        return found

    def _round_bytes(self, family: Family, ratio: float, bucket: int, number: int) -> int:
        points = sorted(family.ladder, key=lambda point: point.ratio)
        sizes = [point.buckets[bucket].rounds[number].bytes for point in points]
        return round(float(np.interp(ratio, [point.ratio for point in points], sizes)))

    # --- worth -----------------------------------------------------------------------------------

    def gains(self, options: tuple[Option, ...], progress: float) -> Floats:
        """Return true gains before skipping, (K, B)."""
        grouped: dict[tuple[str, object], list[int]] = {}
        for k, option in enumerate(options):
            grouped.setdefault(option.family, []).append(k)
        found = np.empty((len(options), len(self.job.layout.buckets)))
        for numbers in grouped.values():
            ratios = np.array([options[k].ratio for k in numbers])
            found[numbers] = self.job.gradients.gain(options[numbers[0]].family, ratios, progress)
        return found

    def worth(self, options: tuple[Option, ...], progress: float) -> tuple[Floats, Floats]:
        """Return true gain and efficiency of options, both (K, B), skipping included.

        The same model of efficiency as the policies', but of the true gain.
        """
        gains = self.gains(options, progress)
        left = np.array([skip_gain(o.collective, self.ranks, o.skip) for o in options])[:, None]
        heard = [skip_efficiency(h, o.divisor) for h, o in zip(left[:, 0], options, strict=True)]
        exponents = [self.family(o).efficiency_exponent for o in options]
        worth = np.stack(
            [efficiency(row, power) for row, power in zip(gains, exponents, strict=True)]
        )
        return (
            np.clip(gains * left, SMALLEST, 1.0),
            np.clip(worth * np.array(heard)[:, None], SMALLEST, 1.0),
        )

    def seconds(self, costs: Costs, link: Link) -> Floats:
        """Return step times without noise of options given to all buckets, (K,)."""
        ready = np.array(self.job.ready_seconds)
        end = wire_end(
            ready,
            costs.compress,
            costs.alphas * link.alpha,
            costs.pushed * link.beta,
            costs.decompress,
            costs.native,
            costs.at_once,
        )
        return step_seconds(self.job.compute_seconds, ready, end)


def safe(option: Option) -> bool:
    """Return whether an option is dense or bf16 by the backend, which is always allowed."""
    return option in (DENSE, BF16)

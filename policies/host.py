"""The compressor whose ratio a policy steers: bytes, seconds and gain as functions of the ratio.

Shapes: R ratios, B buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.base import Inputs
from gradpilot.policies.compute import ComputeModel, bracket
from gradpilot.policies.gain import GainModel
from gradpilot.policies.options import Head, carriers, ratio_grid, sum_rounds, usable
from gradpilot.protos.messages import Family, LinkEstimate, Option

Floats = NDArray[np.float64]


class Host:
    """A family under one carrier, on the buckets of the present layout.

    Args:
        inputs: What is known.
        family: One of ``inputs.families`` with usable rounds.
        collective: One of the family's carriers.
    """

    def __init__(self, inputs: Inputs, family: Family, collective: str) -> None:
        self.family = family
        self.collective = collective
        self._inputs = inputs
        self._ladder = sum_rounds(family)
        self._gains = GainModel(inputs.layout.buckets, inputs.buckets)
        self.weights = self._gains.weights
        """Share of every bucket in ||gradient||^2, (B,)."""

    @property
    def lowest(self) -> float:
        """Return the least ratio of the catalog's ladder."""
        return float(self._ladder.ratios[0])

    @property
    def highest(self) -> float:
        """Return the greatest ratio of the catalog's ladder."""
        return float(self._ladder.ratios[-1])

    def grid(self, also: Sequence[float] = ()) -> Floats:
        """Return ``settings.ratios`` ratios on a log grid over the ladder, and some more."""
        grid = ratio_grid(self._ladder.ratios, self._inputs.settings.ratios)
        return np.unique([*grid, *also])

    def clamp(self, ratio: float) -> float:
        """Return a ratio that the ladder spans."""
        return min(max(ratio, self.lowest), self.highest)

    def option(self, ratio: float) -> Option:
        """Return the option with this ratio."""
        return self.family.option(float(ratio), self.collective)

    def payload(self, ratios: Floats) -> Floats:
        """Return payload bytes that one rank hands to collectives, (R, B)."""
        sizes: Floats = self._rounds(ratios)[1].sum(axis=2)
        return sizes

    def gain(self, ratios: Floats) -> Floats:
        """Return the share of ||corrected||^2 that is sent, (R, B), by the live energy curve."""
        return self._gains.predicted(self.family, ratios)

    def codec_seconds(self, ratios: Floats) -> Floats:
        """Return seconds to compress and decompress, (R, B); NaN if never measured."""
        elements = np.array([max(b.elements, 1) for b in self._inputs.layout.buckets], dtype=float)
        key = (self.family.compressor, self.family.settings)
        compress, decompress = ComputeModel(self._inputs.compute).seconds(key, ratios, elements)
        return compress + decompress

    def wire(self, ratios: Floats, link: LinkEstimate) -> tuple[Floats, Floats]:
        """Return seconds on the wire that bytes do not change, and those they take; (R, B) each."""
        counts, sizes = self._rounds(ratios)
        head = Head(self.family, self.collective, 0)
        alphas, payloads = carriers(head, self._inputs.world_size, self._inputs.backend)
        latency: Floats = (counts @ alphas) * link.alpha_seconds
        transfer: Floats = (sizes @ payloads) * link.beta_seconds_per_byte
        return latency, transfer

    def _rounds(self, ratios: Floats) -> tuple[Floats, Floats]:
        """Return counts and bytes per kind of round, (R, B, kinds), linear between two points."""
        ladder = self._ladder
        low, high, share = bracket(ladder.ratios, ratios)
        weight = share[:, None, None]
        counts = ladder.counts[low] + weight * (ladder.counts[high] - ladder.counts[low])
        sizes = ladder.sizes[low] + weight * (ladder.sizes[high] - ladder.sizes[low])
        return counts, sizes


def find_host(
    inputs: Inputs, compressor: str, collectives: Sequence[str], setting: str = ""
) -> Host | None:
    """Return a compressor under the first of some carriers that it and the operator allow.

    Args:
        inputs: What is known.
        compressor: Registered name.
        collectives: Carriers wanted, best first.
        setting: Value that one of the family's settings must have, such as ``star``.
    """
    for family in inputs.families:
        if family.compressor != compressor or not usable(family, len(inputs.layout.buckets)):
            continue
        if setting and setting not in (s.value for s in family.settings):
            continue
        for collective in collectives:
            if collective in family.collectives and collective in inputs.settings.collectives:
                return Host(inputs, family, collective)
    return None

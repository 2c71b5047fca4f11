"""The candidates of a decision and what the models predict for them.

Shapes: K options, B buckets, P candidates (one option per bucket each).

Every option's cost on every bucket is computed once; candidates are rows of option numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.base import Inputs
from gradpilot.policies.compute import ComputeModel, bracket
from gradpilot.policies.cost import at_once
from gradpilot.policies.evaluation import Evaluation, Table
from gradpilot.policies.gain import SMALLEST, GainModel, efficiency, skip_efficiency, skip_gain
from gradpilot.policies.options import (
    MAX_OPTIONS,
    Ladder,
    bucket_groups,
    carriers,
    current_options,
    group_starts,
    make_heads,
    ratio_grid,
    sum_rounds,
    usable,
)
from gradpilot.policies.timeline import step_seconds, straggle_seconds, wire_end
from gradpilot.protos.messages import BF16, DENSE, Candidate, Family, LinkEstimate, Option

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

MAX_GROUPS = 4
CHUNK = 2_000_000
"""Candidates times buckets that are evaluated at once."""


class _Basis(NamedTuple):
    """A family at some ratios, without its wire: (ratios, B), rounds (ratios, B, kinds)."""

    ratios: Floats
    counts: Floats
    sizes: Floats
    compress: Floats
    decompress: Floats
    gain: Floats
    efficiency: Floats


class Space:
    """All options of a decision; evaluates candidates.

    Args:
        inputs: What is known.
        link: Latency and bandwidth to predict with.
    """

    def __init__(self, inputs: Inputs, link: LinkEstimate) -> None:
        self.inputs = inputs
        self._link = link
        buckets = inputs.layout.buckets
        self._elements = np.array([max(b.elements, 1) for b in buckets], dtype=np.float64)
        self._dense_bytes = float(sum(b.dense_bytes for b in buckets)) or 1.0
        ready = np.nan_to_num(
            np.array([s.ready_seconds for s in inputs.buckets], dtype=np.float64),
            nan=0.0, posinf=0.0, neginf=0.0,
        )  # fmt: skip
        self._ready = np.maximum(ready, 0.0)
        self.compute = ComputeModel(inputs.compute)
        """Seconds of compressors."""
        self.current_options = current_options(inputs)
        """Option per bucket under the plan in force; empty before the first plan."""
        start = () if inputs.start is None else (inputs.start,) * len(buckets)
        self.present_options = self.current_options or start
        """The same, and before the first plan what the ranks started with; empty if unknown."""
        self.gains = GainModel(
            buckets,
            inputs.buckets,
            self.present_options,
            inputs.families,
            inputs.history.gains,
            inputs.step,
        )
        self._ladders: dict[int, Ladder] = {}
        families = [f for f in inputs.families if usable(f, len(buckets))]
        warm = inputs.history.warmth.warm
        self.heads = make_heads(
            families,
            inputs.world_size,
            inputs.settings.ratios,
            skips=warm,
            collectives=inputs.settings.collectives,
        )
        levels = min(inputs.settings.ratios, MAX_OPTIONS // max(len(self.heads), 1))
        tables = []
        known: dict[int, _Basis] = {}  # the heads of a family differ in the wire only
        for h, head in enumerate(self.heads):
            key = id(head.family)
            if key not in known:
                grid = ratio_grid(self._ladder(head.family).ratios, levels)
                known[key] = self._basis(head.family, grid)
            tables.append(self._rows(h, known[key]))
        self._first = np.cumsum([0, *(len(t.ratio) for t in tables)])
        self.table = Table.join(tables) if tables else None
        self._extra: list[Option] = []
        self._straggle = 0.0
        predicted = inputs.compute_seconds
        present = self.present()  # first, so that what is in use is a candidate, too
        if present is not None and present.valid[0]:
            predicted = float(present.step_seconds[0])
        waited = inputs.straggle_seconds
        self._straggle = straggle_seconds(waited, inputs.step_seconds, predicted)

    @property
    def straggle_seconds(self) -> float:
        """Return what waiting for slower ranks adds to every candidate."""
        return self._straggle

    def __len__(self) -> int:
        return 0 if self.table is None else len(self.table.ratio)

    # --- options ---------------------------------------------------------------------------------

    def option(self, k: int) -> Option:
        """Return option number ``k``."""
        assert self.table is not None
        own = k - int(self._first[-1])
        if own >= 0:
            return self._extra[own]
        head = self.heads[int(self.table.head[k])]
        return head.family.option(float(self.table.ratio[k]), head.collective, head.skip)

    def add(self, option: Option) -> int | None:
        """Return the number of any option, adding it if it is not in the grid; None if unknown."""
        if self.table is None:
            return None
        wanted = (option.family, option.collective, option.skip)
        h = next((h for h, head in enumerate(self.heads) if head.key == wanted), None)
        if h is None:
            return None
        grid = self.table.ratio[self._first[h] : self._first[h + 1]]
        near = np.flatnonzero(np.abs(grid - option.ratio) <= 1e-9 * grid)
        if len(near):
            return int(self._first[h] + near[0])
        if option in self._extra:
            return int(self._first[-1]) + self._extra.index(option)
        if not 0 < option.ratio <= 1:
            return None
        basis = self._basis(self.heads[h].family, np.array([option.ratio]))
        self.table = Table.join([self.table, self._rows(h, basis)])
        self._extra.append(option)
        return len(self) - 1

    def gathers(self, h: int) -> bool:
        """Return whether head ``h`` moves its payload by all-gather."""
        head = self.heads[h]
        kinds = self._ladder(head.family).counts.sum(axis=(0, 1))
        return bool(kinds[2] > 0 or head.collective == "allgather")

    def _basis(self, family: Family, ratios: Floats) -> _Basis:
        """Return what does not depend on the collective."""
        ladder = self._ladder(family)
        low, high, share = bracket(ladder.ratios, ratios)
        weight = share[:, None, None]
        key = (family.compressor, family.settings)
        compress, decompress = self.compute.seconds(key, ratios, self._elements)
        if key in (DENSE.family, BF16.family):  # next to nothing, should it not be measured
            compress, decompress = np.nan_to_num(compress), np.nan_to_num(decompress)
        gain = self.gains.gain(family, ratios)
        return _Basis(
            ratios=ratios,
            counts=ladder.counts[low] + weight * (ladder.counts[high] - ladder.counts[low]),
            sizes=ladder.sizes[low] + weight * (ladder.sizes[high] - ladder.sizes[low]),
            compress=compress,
            decompress=decompress,
            gain=gain,
            efficiency=efficiency(gain, family.efficiency_exponent),
        )

    def _rows(self, h: int, basis: _Basis) -> Table:
        """Return the table of one head."""
        head, n = self.heads[h], self.inputs.world_size
        a, b = carriers(head, n, self.inputs.backend)
        left = skip_gain(head.collective, n, head.skip)
        worth = skip_efficiency(left, self.inputs.settings.skip_divisor)
        native = head.collective == "native"
        ladder = self._ladder(head.family)
        full = ladder.ratios.tolist() == [1.0]
        safe = native and full and head.key[0] in (DENSE.family, BF16.family)
        rows = len(basis.ratios)
        return Table(
            head=np.full(rows, h, dtype=np.intp),
            ratio=basis.ratios,
            safe=np.full(rows, safe),
            native=np.full(rows, native and ladder.single_round and not self.inputs.sequential),
            compress=basis.compress,
            decompress=basis.decompress,
            latency=(basis.counts @ a) * self._link.alpha_seconds,
            transfer=(basis.sizes @ b) * self._link.beta_seconds_per_byte,
            gain=np.clip(basis.gain * left, SMALLEST, 1.0),
            credit=np.clip(basis.gain * left / head.family.floor_factor, SMALLEST, 1.0),
            efficiency=np.clip(basis.efficiency * worth, SMALLEST, 1.0),
            size=basis.sizes.sum(axis=2),
        )

    def _ladder(self, family: Family) -> Ladder:
        if id(family) not in self._ladders:
            self._ladders[id(family)] = sum_rounds(family)
        return self._ladders[id(family)]

    # --- candidates ------------------------------------------------------------------------------

    def uniform(self) -> Evaluation:
        """Evaluate every option given to all buckets."""
        every = np.arange(len(self), dtype=np.intp)[:, None]
        return self.evaluate(np.broadcast_to(every, (len(self), len(self._elements))))

    def present(self) -> Evaluation | None:
        """Evaluate what is in use; None if that or an option of it is unknown."""
        if not self.present_options:
            return None
        numbers = {option: self.add(option) for option in dict.fromkeys(self.present_options)}
        row = [numbers[option] for option in self.present_options]
        if any(k is None for k in row):
            return None
        return self.evaluate(np.array([row], dtype=np.intp))

    def evaluate(self, rows: Indices) -> Evaluation:
        """Predict candidates given as option numbers, (P, B)."""
        assert self.table is not None
        size = max(1, CHUNK // max(rows.shape[1], 1))
        parts = [self._evaluate(rows[at : at + size]) for at in range(0, len(rows), size)]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.join(part)
        return whole

    def _evaluate(self, rows: Indices) -> Evaluation:
        table = self.table
        assert table is not None
        whole = np.array_equal(rows[:, 0], np.arange(len(self))) and (rows == rows[:, :1]).all()
        column = np.arange(rows.shape[1])

        def pick(values: Floats) -> Floats:
            return values if whole else values[rows, column]

        weights = self.gains.weights
        compress, decompress = pick(table.compress), pick(table.decompress)
        latency, transfer = pick(table.latency), pick(table.transfer)
        native: NDArray[np.bool_] = np.asarray(table.native[rows].all(axis=1))
        end = wire_end(
            self._ready, compress, latency, transfer, decompress, native,
            at_once(self.inputs.backend),
        )  # fmt: skip
        worth = np.clip(pick(table.efficiency) @ weights, SMALLEST, 1.0)
        return Evaluation(
            rows=rows,
            statistical_loss=1.0 - worth,
            compression_seconds=(compress + decompress).sum(axis=1),
            synchronisation_seconds=(latency + transfer).sum(axis=1),
            step_seconds=step_seconds(self.inputs.compute_seconds, self._ready, end)
            + self._straggle,
            gain=np.clip(pick(table.gain) @ weights, SMALLEST, 1.0),
            credit=np.clip(pick(table.credit) @ weights, SMALLEST, 1.0),
            efficiency=worth,
            wire_ratio=pick(table.size).sum(axis=1) / self._dense_bytes,
            safe=np.asarray(table.safe[rows].all(axis=1)),
        )

    def wire(self, row: Indices) -> tuple[Floats, Floats, Floats, Floats, bool]:
        """Return elements, readiness, latency and transfer seconds of every bucket under a row.

        The last item tells whether buckets overlap on the wire, see ``timeline.wire_end``.
        """
        table = self.table
        assert table is not None
        at = (row, np.arange(len(row)))
        pipelined = bool(table.native[row].all())
        return self._elements, self._ready, table.latency[at], table.transfer[at], pipelined

    def options(self, row: Indices) -> tuple[Option, ...]:
        """Return the option of every bucket."""
        known = {int(k): self.option(int(k)) for k in np.unique(row)}
        return tuple(known[int(k)] for k in row)

    def candidate(self, evaluation: Evaluation, i: int) -> Candidate:
        """Return one candidate as it is stored and explained."""
        row = evaluation.rows[i]
        uniform = bool((row == row[0]).all())
        options = self.options(row[:1] if uniform else row[group_starts(self.groups())])
        if not uniform and set(options) != set(self.options(row)):
            options = self.options(row)  # a plan whose groups are not ours
        return Candidate(
            options=options,
            statistical_loss=float(evaluation.statistical_loss[i]),
            compression_seconds=float(evaluation.compression_seconds[i]),
            synchronisation_seconds=float(evaluation.synchronisation_seconds[i]),
            gain=float(evaluation.gain[i]),
            efficiency=float(evaluation.efficiency[i]),
            step_seconds=float(evaluation.step_seconds[i]),
            wire_ratio=float(evaluation.wire_ratio[i]),
        )

    def groups(self, most: int = MAX_GROUPS) -> Indices:
        """Return the group of every bucket, (B,): cut where log sizes leave the widest gaps."""
        return bucket_groups(self._elements, most)

    # --- coding for the evolutionary solver ------------------------------------------------------

    @property
    def levels(self) -> int:
        """Return the length of the longest ratio grid."""
        return int(np.diff(self._first).max())

    def decode(self, heads: Indices, levels: Indices) -> Indices:
        """Return option numbers of (head, level) pairs; short grids spread over the levels."""
        length = np.diff(self._first)[heads]
        inner = np.minimum(levels * length // self.levels, length - 1)
        numbers: Indices = self._first[heads] + inner
        return numbers

    def encode(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Return the (head, level) pairs of option numbers; off-grid ratios go to the nearest."""
        assert self.table is not None
        heads = self.table.head[numbers]
        length = np.diff(self._first)[heads]
        inner = numbers - self._first[heads]
        for at in np.flatnonzero(numbers >= self._first[-1]):
            h = heads.flat[at]
            grid = self.table.ratio[self._first[h] : self._first[h + 1]]
            away = np.abs(np.log(grid / self.table.ratio[numbers.flat[at]]))
            inner.flat[at] = int(away.argmin())
        return heads, -(-inner * self.levels // length)

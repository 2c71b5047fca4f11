"""What ``bench.compressors`` measures, one function a kind of row; each runs in its own process."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from bench import _gradients
from bench._baselines import Baseline, baselines
from bench._memory import peak_extra_bytes
from bench._rounds import Rehearsal, rehearse
from gradpilot.errors import ConfigError
from gradpilot.worker_agent.compressors.base import (
    COMPRESSORS,
    NOTHING,
    Compressor,
    leave_residual_,
    option_of,
)
from gradpilot.worker_agent.compressors.settings import bounds_of
from gradpilot.worker_agent.virtual import virtual_step

SEED = 0
RANKS = 4

ASIDE: dict[str, dict[str, object]] = {"thc": {"stages": 31}}
"""Settings that no ladder has but a claim is about: rotating everything as a whole."""

Row = dict[str, Any]
Shapes = tuple[torch.Size, ...]


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        names: Compressors.
        buckets: Shapes of the buckets to time; all but the first for compressors of matrices only.
        error_elements: About how many elements the error is measured on.
        repeats: Timed runs.
        members: Most members of a ladder.
        configurations: Threads and heaps to time with.
    """

    names: tuple[str, ...]
    buckets: tuple[Shapes, ...]
    error_elements: int
    repeats: int
    members: int
    configurations: tuple[tuple[int, str], ...]

    @property
    def elements(self) -> int:
        """Return the elements of a bucket to time."""
        return sum(shape.numel() for shape in self.buckets[0])


def members(kind: type[Compressor], most: int) -> list[Compressor]:
    """Return members of a ladder, evenly spread, and the default with every word of its choices."""
    found = list(kind.ladder())
    if len(found) > most:
        found = [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]
    default = cast(Any, kind())
    for name, bounds in bounds_of(kind).items():
        for word in bounds.choices:
            # A word may not go with the other defaults.
            with contextlib.suppress(ConfigError):
                found.append(replace(default, **{name: word}))
    if kind.name in ASIDE:
        found += [default, replace(default, **ASIDE[kind.name])]
    return list(dict.fromkeys(found))


def times(extent: Extent) -> list[Row]:
    """Return seconds to compress, decompress and keep the residual; one warm-up run each."""
    rows = []
    for grad, rehearsal, matrices in _rehearsals(extent):
        spans = []
        out = torch.zeros_like(grad)
        for _ in range(extent.repeats + 1):
            work = grad.clone()
            estimate, compress, decompress = rehearsal.run(work, out)
            begun = time.perf_counter()
            if rehearsal.at.feedback:
                leave_residual_(work, estimate)
            spans.append((compress, decompress, time.perf_counter() - begun))
            del estimate  # its memory is to be there for the next run
        rows.append(
            {
                **_row("time", grad.numel(), rehearsal.compressor),
                "matrices": matrices,
                "wire_bytes": rehearsal.wire_bytes,
                **_spread(spans[1:]),
            }
        )
    return rows + [_baseline_times(one, extent) for one in baselines(extent.elements, RANKS)]


def memory(extent: Extent) -> list[Row]:
    """Return the peak extra memory of compressing and decompressing.

    Beside the gradient and the place of the mean: to the hook these are the buffer that becomes the
    residual and the bucket's own.
    """
    rows = []
    for grad, rehearsal, matrices in _rehearsals(extent):
        rows.append(
            {
                **_row("memory", grad.numel(), rehearsal.compressor),
                "matrices": matrices,
                **_peak(grad, partial(rehearsal.run, out=torch.zeros_like(grad))),
                "replies_buckets": round(sum(r.nbytes for r in rehearsal.replies) / grad.nbytes, 3),
            }
        )
    (grad,) = _gradients.heavy_tailed(extent.elements, 1, SEED)
    for one in baselines(extent.elements, RANKS):
        row = _row("memory", grad.numel(), what=one.name)
        rows.append({**row, **_peak(grad, partial(_there_and_back, one))})
    return rows


def errors(extent: Extent) -> list[Row]:
    """Return the squared error of the mean over the squared norm of the true mean."""
    rows = []
    for data, (grads, shapes) in _gradients.samples(extent.error_elements, RANKS, SEED):
        true = torch.stack(grads).double().mean(0)
        n = true.numel()
        for member in _members(extent):
            mean, sent = _second_step(member, grads, shapes)
            row = _row("error", n, member)
            bits = round(8 * sent / n, 4)
            rows.append({**row, "data": data, "bits": bits, "vnmse": _vnmse(mean, true)})
        for one in baselines(n, RANKS):
            if one.mean is not None:
                row = _row("error", n, what=one.name)
                bits = round(8 * one.size(one.compress(grads[0])) / n, 4)
                mean = one.mean(grads)
                rows.append({**row, "data": data, "bits": bits, "vnmse": _vnmse(mean, true)})
    return rows


def _members(extent: Extent) -> Iterator[Compressor]:
    for name in extent.names:
        yield from members(COMPRESSORS.get(name), extent.members)


def _rehearsals(extent: Extent) -> Iterator[tuple[Tensor, Rehearsal, str]]:
    """Yield rank 0's gradient, what it needs to run alone, and the matrices in words."""
    grads = _gradients.heavy_tailed(extent.elements, RANKS, SEED)
    for member in _members(extent):
        for shapes in extent.buckets if member.needs_matrices else extent.buckets[:1]:
            sides = "x".join(map(str, shapes[0]))
            matrices = sides if len(shapes) == 1 else f"{len(shapes)} of {sides}"
            yield grads[0], rehearse(member, grads, shapes), matrices


def _second_step(member: Compressor, grads: Sequence[Tensor], shapes: Shapes) -> tuple[Tensor, int]:
    """Return the mean of the second step on the same gradients, and the bytes handed in."""
    option = option_of(member, member.collectives[0])
    memories: Sequence[Mapping[str, Tensor]] = [NOTHING] * len(grads)
    for number in range(2):
        step = virtual_step(
            option, grads, step=number, shapes=shapes, compressor=member, memories=memories
        )
        memories = step.memories
    return step.mean, sum(wire.bytes for wire in step.wire)


def _vnmse(mean: Tensor, true: Tensor) -> float:
    error = (mean.double() - true).square().sum() / true.square().sum()
    return float(f"{float(error):.4g}")


def _baseline_times(one: Baseline, extent: Extent) -> Row:
    (grad,) = _gradients.heavy_tailed(extent.elements, 1, SEED)
    spans = []
    for _ in range(extent.repeats + 1):
        marks = [time.perf_counter()]
        sent = one.compress(grad)
        marks.append(time.perf_counter())
        if one.decompress is not None:
            one.decompress(sent)
        marks.append(time.perf_counter())
        spans.append((marks[1] - marks[0], marks[2] - marks[1], 0.0))
        size = one.size(sent)
        del sent
    return {
        **_row("time", grad.numel(), what=one.name),
        "wire_bytes": size,
        **_spread(spans[1:]),
    }


def _there_and_back(one: Baseline, grad: Tensor) -> object:
    sent = one.compress(grad)
    return sent, None if one.decompress is None else one.decompress(sent)


def _peak(grad: Tensor, call: Callable[[Tensor], object]) -> Row:
    peak = peak_extra_bytes(lambda: call(grad))
    return {"peak_extra_bytes": peak, "peak_extra_buckets": round(peak / grad.nbytes, 2)}


def _row(kind: str, elements: int, member: Compressor | None = None, what: str = "") -> Row:
    """Return what every row has; the settings of a compressor as ``name=value``."""
    if member is not None:
        what = option_of(member, member.collectives[0]).label.rsplit(" ", 1)[0]
    names = sorted(bounds_of(type(member))) if member is not None else []
    return {
        "kind": kind,
        "what": what,
        "compressor": "" if member is None else member.name,
        "ladder": member is not None and member in type(member).ladder(),
        "settings": [f"{name}={getattr(member, name)}" for name in names],
        "elements": elements,
    }


def _spread(spans: Sequence[tuple[float, float, float]]) -> Row:
    """Return median, least and greatest milliseconds of each phase."""
    row: Row = {}
    for number, phase in enumerate(("compress", "decompress", "residual")):
        values = [1e3 * span[number] for span in spans]
        row[f"{phase}_ms"] = round(statistics.median(values), 3)
        row[f"{phase}_ms_range"] = [round(min(values), 3), round(max(values), 3)]
    return row

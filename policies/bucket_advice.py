"""What DDP buckets of another size would give: advice for ``bucket_cap_mb``, never acted on.

The present layout is cut anew along its elements. When an element is ready is interpolated
between the present buckets: all of a bucket's elements are there when the bucket is, in the order
of issue. Wire bytes keep their density over the elements, and each new bucket pays the latency of a
present one (derived here). Parameters are taken to be divisible, so real buckets of a model with
large tensors are larger; gain and efficiency are taken to stay.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.compute import ComputeModel
from gradpilot.policies.cost import at_once
from gradpilot.policies.problem import Space
from gradpilot.protos.explanations import BucketAdvice
from gradpilot.protos.messages import BF16, DENSE, Option

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

MEGABYTES = (1.0, 5.0, 25.0, 50.0, 100.0)
"""Sizes that are tried; 25 is DDP's default."""

MOST_BUCKETS = 1000
"""Sizes that would make more buckets are left out."""

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}
"""Bytes of an element by dtype; others are taken for 4."""


class Buckets(NamedTuple):
    """Buckets in issue order, each (B,) but ``share``.

    Attributes:
        elements: Size.
        ready: When it is ready, seconds from any one origin.
        latency: Wire seconds that do not depend on bytes.
        transfer: Wire seconds that bytes occupy.
        share: Part of each bucket's elements that came from each present bucket, (B, present).
    """

    elements: Floats
    ready: Floats
    latency: Floats
    transfer: Floats
    share: Floats


def resize(
    elements: Floats, ready: Floats, latency: Floats, transfer: Floats, size: float
) -> Buckets:
    """Cut buckets of ``size`` elements, the last one smaller, out of present ones.

    Before the first present bucket is ready, elements become ready at the mean pace of the others;
    with a single bucket nothing is known of the pace, and all are ready at once.

    Args:
        elements: Present sizes, (P,).
        ready: Offsets of their readiness, (P,).
        latency: Wire seconds that do not depend on bytes, (P,).
        transfer: Wire seconds that bytes occupy, (P,).
        size: Elements of a new bucket.
    """
    ends = np.cumsum(elements)
    total = float(ends[-1])
    count = max(int(np.ceil(total / size - 1e-9)), 1)
    cuts = np.minimum(np.arange(count + 1) * size, total)
    cuts[-1] = total
    # When it is ready can only grow along the order of issue.
    known = np.maximum.accumulate(ready)
    pace = (known[-1] - known[0]) / (total - ends[0]) if len(ends) > 1 else 0.0
    early = np.minimum(cuts[1:] - ends[0], 0.0) * pace
    at = np.interp(cuts[1:], ends, known) + early
    low, high = cuts[:-1, None], cuts[1:, None]
    overlap = np.clip(np.minimum(high, ends) - np.maximum(low, ends - elements), 0.0, None)
    share = overlap / overlap.sum(axis=1, keepdims=True)
    return Buckets(
        cuts[1:] - cuts[:-1], at, share @ latency, overlap @ (transfer / elements), share
    )


def seconds(
    buckets: Buckets,
    options: tuple[Option, ...],
    model: ComputeModel,
    compute_seconds: float,
    *,
    pipelined: bool,
    at_once: int,
) -> float:
    """Return the predicted step time; NaN if a compressor was never timed.

    Args:
        buckets: From ``resize``.
        options: Option of every present bucket.
        model: Seconds of compressors.
        compute_seconds: The part of a step that no plan changes.
        pipelined: Whether buckets overlap on the wire, see ``timeline.wire_end``.
        at_once: How many of them, see there.
    """
    compress, decompress = np.zeros((2, len(buckets.elements)))
    for option in dict.fromkeys(options):
        part = buckets.share @ np.array([one == option for one in options], dtype=np.float64)
        found = model.seconds(option.family, np.array([option.ratio]), buckets.elements)
        for total, value in zip((compress, decompress), found, strict=True):
            if option.family in (DENSE.family, BF16.family):  # as in ``problem``
                value = np.nan_to_num(value)
            total += np.where(part > 0, part * value[0], 0.0)
    if not np.isfinite(compress + decompress).all():
        return float("nan")
    end = last_end(buckets, compress, decompress, pipelined=pipelined, at_once=at_once)
    return compute_seconds + max(0.0, end - float(buckets.ready.max()))


def last_end(
    buckets: Buckets, compress: Floats, decompress: Floats, *, pipelined: bool, at_once: int
) -> float:
    """Return when the last bucket is done: ``timeline.wire_end`` for one candidate, but faster.

    Args:
        buckets: From ``resize``.
        compress: Seconds before the last collective is issued, (B,).
        decompress: Seconds after the reply, (B,).
        pipelined: See ``wire_end``.
        at_once: See ``wire_end``.
    """
    if not pipelined:
        # The queue is busy without a break from some bucket on, so its end is the latest of all
        # ends with the break put before any one bucket.
        whole = compress + buckets.latency + buckets.transfer + decompress
        return float((buckets.ready + np.cumsum(whole[::-1])[::-1]).max())
    wire = last = -np.inf
    done = [-np.inf] * at_once
    columns = (buckets.ready + compress, buckets.transfer, buckets.latency, decompress)
    for ready, transfer, latency, after in zip(*(c.tolist() for c in columns), strict=True):
        wire = max(wire, done[0], ready) + transfer
        done = [*done[1:], max(done[-1], wire + latency)]
        last = max(last, done[-1] + after)
    return float(last)


def advise(space: Space, row: Indices) -> tuple[BucketAdvice, ...]:
    """Return the predicted step time for every size of ``MEGABYTES`` that makes sense.

    Left out are sizes with too many buckets, and all but the smallest of those that put everything
    into one.

    Args:
        space: Options and models.
        row: Number of the option of every bucket, (B,).
    """
    elements, ready, latency, transfer, pipelined = space.wire(row)
    options = space.options(row)
    item = np.array([ITEM_BYTES.get(b.dtype, 4) for b in space.inputs.layout.buckets])
    total = float(elements.sum())
    elements_of_a_megabyte = 2**20 * total / float((elements * item).sum())
    fixed = space.inputs.compute_seconds + space.straggle_seconds
    found: list[BucketAdvice] = []
    for megabytes in MEGABYTES:
        size = megabytes * elements_of_a_megabyte
        if total / size > MOST_BUCKETS or (found and found[-1].buckets == 1):
            continue
        made = resize(elements, ready, latency, transfer, size)
        value = seconds(
            made, options, space.compute, fixed,
            pipelined=pipelined, at_once=at_once(space.inputs.backend),
        )  # fmt: skip
        if np.isfinite(value):
            found.append(BucketAdvice(megabytes, len(made.elements), value))
    return tuple(found)

"""Step time: buckets become ready during backward, one wire carries them, what sticks out counts.

Waiting for slower ranks comes on top; it is the same under every plan.

Shapes: P candidates, B buckets in issue order.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def wire_end(
    ready: Floats,
    compress: Floats,
    latency: Floats,
    transfer: Floats,
    decompress: Floats,
    pipelined: NDArray[np.bool_],
    at_once: int = 1,
) -> Floats:
    """Return when the last bucket is done, counted from the first bucket being ready; (P,).

    In sequence (the communication thread): compress, rounds, decompress, then the next bucket.
    Pipelined (every bucket one native all-reduce, issued asynchronously): compressing overlaps with
    everything, the backend works on ``at_once`` buckets at a time in order, their bytes queue on
    the wire, and the latency of one overlaps with the bytes of the others.

    Args:
        ready: Offset of each bucket's readiness, (B,).
        compress: Seconds before the last collective is issued, (P, B).
        latency: Part of the wire time that does not depend on bytes, (P, B).
        transfer: Part of the wire time that bytes occupy, (P, B).
        decompress: Seconds after the reply, (P, B).
        pipelined: Which candidates overlap their buckets, (P,).
        at_once: Collectives that the backend works on at a time, see ``cost.at_once``.
    """
    end = np.zeros(len(compress))
    wire = np.zeros(len(compress))
    last = np.zeros(len(compress))
    done = [np.zeros(len(compress))] * at_once  # of the newest buckets, oldest first
    whole = compress + latency + transfer + decompress
    some, every = bool(pipelined.any()), bool(pipelined.all())
    for b, at in enumerate(ready):
        if not every:
            end = np.maximum(end, at) + whole[:, b]
        if some:
            begin = np.maximum(done[0], at + compress[:, b])
            wire = np.maximum(wire, begin) + transfer[:, b]
            done = [*done[1:], np.maximum(done[-1], wire + latency[:, b])]
            last = np.maximum(last, done[-1] + decompress[:, b])
    return np.where(pipelined, last, end)


def step_seconds(compute_seconds: float, ready: Floats, end: Floats) -> Floats:
    """Return step times: compute plus what sticks out behind the last ready bucket."""
    last_ready = float(ready.max()) if len(ready) else 0.0
    return compute_seconds + np.maximum(0.0, end - last_ready)


def straggle_seconds(waited: float, measured: float, predicted: float) -> float:
    """Return what waiting for slower ranks adds to every step, whatever the plan.

    What ranks wait in collectives is only an upper bound of it: a rank that is always late is in
    the compute time of the slowest one already, and one delay shows in several buckets. So it
    counts as far as the measured step is longer than the prediction without it.

    Args:
        waited: Seconds that the median rank waits in the collectives of a step.
        measured: Step time now; 0 if unknown.
        predicted: What is predicted for the present plan without waiting, or a part of that.
    """
    if not (math.isfinite(waited) and waited > 0):
        return 0.0
    if not (math.isfinite(measured) and measured > 0 and math.isfinite(predicted)):
        return waited
    return min(waited, max(measured - predicted, 0.0))

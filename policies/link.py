"""Latency and bandwidth of the link, fitted from the collectives that the job ran anyway.

Every collective takes ``a * alpha + b * bytes * beta`` seconds with known ``a`` and ``b``
(``policies.cost``), so alpha and beta are a regression with two unknowns. Noise is multiplicative
and one-sided outliers are common (stalls, retransmissions), hence: a start by least median of
relative errors over pairs of operations, then Tukey's bisquare.

Of a collective that began while the one before it was under way, the latency may have passed by
the end of that one; what it took then is its bytes alone. Which of them those are depends on the
latency, so the fit is repeated until both agree (derived here).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradpilot.policies.base import Operation
from gradpilot.policies.change import NOISE, first_of_present
from gradpilot.policies.cost import coefficients
from gradpilot.protos.messages import COLLECTIVES, LinkEstimate

Floats = NDArray[np.float64]

NEWEST = 400
"""Older operations are not looked at."""

HALF_LIFE_SECONDS = 60.0
"""An operation this much older counts half."""

MAX_CONDITION = 60.0
MAX_RELATIVE_ERROR = 0.3
"""Beyond these the data do not tell alpha from beta."""

PARTIAL_SECONDS = 60.0
"""An operation that some rank did not tell is used only if no whole one is nearly as new: all may
have waited for that rank, so its minimum is no transfer."""

ALPHA_SCALE = 50e-6
BETA_SCALE = 1e-12
"""Values are told apart down to these; below them no plan differs."""

SPAN = 64.0
"""Sizes that span this factor are as good as a probe can give."""


FAR = 0.5
"""Logarithm of measured over predicted from which on an operation is not explained at all."""

ROUNDS = 8
"""Most fits until it is settled of which operations the latency was hidden."""


class _Data(NamedTuple):
    """Usable operations, oldest first: alphas, pushed bytes, seconds, age, kind, overlap."""

    a: Floats
    y: Floats
    t: Floats
    age: Floats
    kind: NDArray[np.intp]
    beside: Floats

    def cut(self, first: int) -> _Data:
        return _Data(
            self.a[first:], self.y[first:], self.t[first:], self.age[first:], self.kind[first:],
            self.beside[first:],
        )  # fmt: skip

    def seen(self, alpha: float) -> _Data:
        """Return the operations with what of them could be seen at a latency.

        Either it was over when the collective before ended, and bytes alone are left; or it was
        not, and the time since the beginning counts.
        """
        hidden = (self.beside > 0) & (self.beside >= self.a * alpha)
        return self._replace(
            a=np.where(hidden, 0.0, self.a), t=np.where(hidden, self.t, self.t + self.beside)
        )


@np.errstate(all="ignore")
def fit_link(
    operations: Sequence[Operation],
    n_ranks: int,
    backend: str = "gloo",
    previous: LinkEstimate | None = None,
    half_life_seconds: float = HALF_LIFE_SECONDS,
) -> LinkEstimate | None:
    """Fit latency and inverse bandwidth.

    Args:
        operations: Timed collectives in any order; those with impossible numbers are ignored.
        n_ranks: Ranks N.
        backend: Whose cost table to use.
        previous: Last estimate. If the newest operations contradict it, older ones are dropped.
        half_life_seconds: Recency weighting.

    Returns:
        The estimate, or None if there is no usable operation. ``separable`` is False where the data
        only tell a mixture of alpha and beta; the numbers then explain the data, not more.
    """
    data = _usable(operations, n_ranks, backend)
    if len(data.t) == 0:
        return None
    if previous is not None and not _plausible(previous):
        previous = None
    if previous is not None:
        data = data.cut(_change(data, previous))
    recency = 0.5 ** ((data.age - data.age.min()) / max(half_life_seconds, 1e-3))
    estimate = _settled(data, recency, previous)
    if estimate.separable or previous is None:
        return estimate
    if not previous.separable:
        return _completed(data.seen(estimate.alpha_seconds), recency, estimate, previous)
    # The data tell one direction only; a known split that agrees with them is kept.
    seen = data.seen(previous.alpha_seconds)
    level = _median(seen.t / _predict(seen, previous), recency)
    if abs(np.log(level)) > 1.5 * NOISE:
        return _completed(seen, recency, estimate, previous)
    return replace(
        previous,
        alpha_seconds=previous.alpha_seconds * level,
        beta_seconds_per_byte=previous.beta_seconds_per_byte * level,
        samples=estimate.samples,
        age_seconds=estimate.age_seconds,
    )


@np.errstate(all="ignore")
def changed_operations(
    operations: Sequence[Operation], n_ranks: int, backend: str, previous: LinkEstimate | None
) -> int:
    """Return how many operations predate the present state of the link; 0 if it did not change."""
    data = _usable(operations, n_ranks, backend)
    if previous is None or not _plausible(previous) or len(data.t) == 0:
        return 0
    return _change(data, previous)


@np.errstate(all="ignore")
def wide_enough(
    operations: Sequence[Operation], n_ranks: int, backend: str, previous: LinkEstimate | None
) -> bool:
    """Return whether the sizes that count already span what a probe would add."""
    data = _usable(operations, n_ranks, backend)
    if previous is not None and _plausible(previous) and len(data.t):
        data = data.cut(_change(data, previous))
    alone = (data.y > 0) & (data.beside == 0)
    sizes = data.y[alone] / data.a[alone]
    return bool(len(sizes)) and bool(sizes.max() >= SPAN * sizes.min())


def _plausible(link: LinkEstimate) -> bool:
    numbers = (link.alpha_seconds, link.beta_seconds_per_byte)
    return bool(np.isfinite(numbers).all() and min(numbers) >= 0 and max(numbers) > 0)


def _usable(operations: Sequence[Operation], n_ranks: int, backend: str) -> _Data:
    rows = []
    kinds: dict[tuple[str, int, int], int] = {}
    newest = min((o.age_seconds for o in operations if o.complete), default=math.inf)
    for o in operations:
        if not o.complete and o.age_seconds >= newest - PARTIAL_SECONDS:
            continue
        if o.collective not in COLLECTIVES or o.bytes < 0:
            continue
        if not (0 < o.transfer_seconds < 1e6 and 0 <= o.age_seconds < 1e12):  # also catches NaN
            continue
        if not 0 <= o.overlapped_seconds < 1e6:
            continue
        a, b = coefficients(o.collective, n_ranks, o.skip, backend)
        if a <= 0:
            continue
        kind = kinds.setdefault((o.collective, o.bytes, o.skip), len(kinds))
        beside = o.overlapped_seconds
        rows.append((a, b * o.bytes, o.transfer_seconds, o.age_seconds, o.step, kind, beside))
    # Sorted by content, so that the order in which reports came does not matter.
    rows.sort(key=lambda row: (-row[3], row[4], row[5], row[2]))
    table = np.array(rows[-NEWEST:], dtype=np.float64).reshape(-1, 7)
    columns = table.T
    numbers = columns[5].astype(np.intp)
    return _Data(columns[0], columns[1], columns[2], columns[3], numbers, columns[6])


def _predict(data: _Data, link: LinkEstimate) -> Floats:
    seconds = data.a * link.alpha_seconds + data.y * link.beta_seconds_per_byte
    return np.maximum(seconds, 1e-9)


def _change(data: _Data, previous: LinkEstimate) -> int:
    """Return the first operation of the present state of the link."""
    data = data.seen(previous.alpha_seconds)
    uncertain = (data.a * previous.alpha_error) ** 2 + (data.y * previous.beta_error) ** 2
    return first_of_present(data.t, _predict(data, previous), uncertain, data.kind)


def _completed(
    seen: _Data, recency: Floats, estimate: LinkEstimate, previous: LinkEstimate
) -> LinkEstimate:
    """Return what data say that cannot separate the two, with what was known of the other before.

    Under payloads that are all small any bandwidth explains the data, none at all as well, and
    every byte would be free. So the number of which less is known stays, and the other follows.
    (Derived here.)
    """
    alpha, beta = previous.alpha_seconds, previous.beta_seconds_per_byte
    # By relative errors, cross-multiplied: either estimate may be zero.
    vague = estimate.beta_error * estimate.alpha_seconds
    if not vague <= estimate.alpha_error * estimate.beta_seconds_per_byte:
        if not previous.beta_error <= MAX_RELATIVE_ERROR * beta:
            return estimate  # it was not known either
        alpha = _median((seen.t - seen.y * beta) / np.maximum(seen.a, 1e-9), recency)
        if alpha <= 0:  # then all of it is bandwidth, and there is more than before
            return estimate
        error = previous.beta_error
        return replace(estimate, alpha_seconds=alpha, beta_seconds_per_byte=beta, beta_error=error)
    if not previous.alpha_error <= MAX_RELATIVE_ERROR * alpha:
        return estimate
    beta = _median((seen.t - seen.a * alpha) / np.maximum(seen.y, 1.0), recency)
    if beta <= 0:
        return estimate
    error = previous.alpha_error
    return replace(estimate, alpha_seconds=alpha, beta_seconds_per_byte=beta, alpha_error=error)


def _median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    return float(values[order[np.searchsorted(total, 0.5 * total[-1])]])


def _settled(data: _Data, recency: Floats, previous: LinkEstimate | None) -> LinkEstimate:
    """Return the fit that agrees with itself about which latencies were hidden."""
    if not data.beside.any():
        return _fit(data, recency)
    guesses = [0.0, math.inf] if previous is None else [previous.alpha_seconds, 0.0, math.inf]
    best, least = None, math.inf
    for guess in guesses:
        alpha, estimate = guess, None
        for _ in range(ROUNDS):
            seen = data.seen(alpha)
            if not seen.a.any():
                break  # nothing is left that tells of latency
            estimate = _fit(seen, recency)
            again = data.seen(estimate.alpha_seconds)
            if np.array_equal(again.a, seen.a):
                break
            alpha = estimate.alpha_seconds
        if estimate is None:
            continue
        seen = data.seen(estimate.alpha_seconds)
        misfit = _median(np.abs(np.log(seen.t / _predict(seen, estimate))), recency)
        if misfit < least:
            best, least = estimate, misfit
    return best if best is not None else _fit(data.seen(0.0), recency)


def _fit(data: _Data, recency: Floats) -> LinkEstimate:
    # Many operations of few small sizes must not outvote the three of a probe that tell the rest.
    recency = recency / np.sqrt(_of_kind(data, recency))
    theta = _start(data, recency)
    weights = recency
    scale = 0.0
    for _ in range(20):
        predicted = np.maximum(data.a * theta[0] + data.y * theta[1], 1e-9)
        errors = (data.t - predicted) / predicted
        scale = max(1.4826 * _median(np.abs(errors), recency), 0.01)
        far = np.minimum(np.abs(errors) / (4.685 * scale), 1.0)
        weights = recency * (1 - far**2) ** 2
        if np.count_nonzero(weights > 1e-3 * weights.max()) < 2:
            break
        new = _solve(data, weights / predicted**2)
        done = np.allclose(new, theta, rtol=1e-6, atol=1e-15)
        theta = new
        if done:
            break
    used = int(np.count_nonzero(weights > 0))
    # Few operations look more exact than they are.
    scale = max(scale, 0.02 if used >= 6 else NOISE)
    errors_, condition = _errors(data, theta, weights, scale)
    alpha, beta = float(theta[0]), float(theta[1])
    separable = bool(
        len(data.t) >= 2
        and condition <= MAX_CONDITION
        and errors_[0] <= MAX_RELATIVE_ERROR * max(alpha, ALPHA_SCALE)
        and errors_[1] <= MAX_RELATIVE_ERROR * max(beta, BETA_SCALE)
    )
    return LinkEstimate(
        alpha_seconds=alpha,
        beta_seconds_per_byte=beta,
        alpha_error=float(errors_[0]),
        beta_error=float(errors_[1]),
        samples=used,
        age_seconds=float(data.age.min()),
        separable=separable,
    )


def _of_kind(data: _Data, weights: Floats) -> Floats:
    """Return the weight of all operations of the same kind."""
    return np.maximum(np.bincount(data.kind, weights)[data.kind], 1e-300)


def _start(data: _Data, recency: Floats) -> Floats:
    """Return the pair of operations that explains most others best (least median)."""
    order = np.argsort(data.y / data.a, kind="stable")
    n = len(order)
    picks = min(12, n)
    low = order[np.unique(np.linspace(0, max((n - 1) * 0.4, 0), picks).astype(np.intp))]
    high = order[np.unique(np.linspace((n - 1) * 0.6, n - 1, picks).astype(np.intp))]
    i, j = (grid.ravel() for grid in np.meshgrid(low, high, indexing="ij"))
    cross = data.a[i] * data.y[j] - data.a[j] * data.y[i]
    good = cross > 1e-9 * data.a[i] * np.maximum(data.y[j], 1e-300)
    i, j, cross = i[good], j[good], cross[good]
    best = _solve(data, recency / np.maximum(data.t, 1e-9) ** 2)
    if len(i) == 0:
        return best
    alpha = np.append((data.t[i] * data.y[j] - data.t[j] * data.y[i]) / cross, best[0])
    beta = np.append((data.t[j] * data.a[i] - data.t[i] * data.a[j]) / cross, best[1])
    alpha, beta = np.maximum(alpha, 0.0), np.maximum(beta, 0.0)
    predicted = np.maximum(np.outer(alpha, data.a) + np.outer(beta, data.y), 1e-9)
    misfit = np.abs(np.log(data.t / predicted))
    ranks = np.argsort(misfit, axis=1, kind="stable")
    total = np.cumsum(recency[ranks], axis=1)
    middle = (total < 0.5 * total[:, -1:]).sum(axis=1)
    medians = np.take_along_axis(
        misfit, np.take_along_axis(ranks, middle[:, None], axis=1), axis=1
    )[:, 0]
    # Where most operations tell of latency alone, any bandwidth explains the median one as well,
    # and the few large ones look like outliers. So of pairs that are about as good there the one
    # counts that explains most kinds of operations, however many there are of each.
    able = np.flatnonzero(medians <= 1.5 * medians.min() + 2 * NOISE)
    share = recency / _of_kind(data, recency)
    loss = np.minimum(misfit[able] / FAR, 1.0) ** 2 @ share
    winner = int(able[int(loss.argmin())])
    return np.array([alpha[winner], beta[winner]])


def _solve(data: _Data, weights: Floats) -> Floats:
    """Return non-negative weighted least squares of two unknowns."""
    columns = np.stack([data.a, data.y], axis=1)
    size = np.sqrt((weights[:, None] * columns**2).sum(axis=0))
    size[size == 0] = 1.0
    root = np.sqrt(weights)
    matrix = root[:, None] * columns / size
    target = root * data.t
    both = np.linalg.lstsq(matrix, target, rcond=1e-9)[0]
    if both.min() < 0:  # one of them is zero: the better one-column fit
        single = np.maximum(matrix.T @ target, 0.0) / np.maximum((matrix**2).sum(axis=0), 1e-300)
        both = np.where(np.arange(2) == int(single.argmax()), single, 0.0)
    solution: Floats = both / size
    return solution


def _errors(data: _Data, theta: Floats, weights: Floats, scale: float) -> tuple[Floats, float]:
    """Return standard errors and the condition number of the design, columns of equal length."""
    predicted = np.maximum(data.a * theta[0] + data.y * theta[1], 1e-9)
    matrix = np.stack([data.a / predicted, data.y / predicted], axis=1)
    inner = matrix.T @ (weights[:, None] * matrix)
    length = np.sqrt(np.diag(inner))
    if not (length > 0).all():
        return np.array([np.inf, np.inf]), float("inf")
    condition = float(np.linalg.cond(inner / np.outer(length, length)) ** 0.5)
    if not condition < 1e6:
        return np.array([np.inf, np.inf]), condition
    # Weights are no inverse variances, so the sandwich form.
    inverse = np.linalg.inv(inner / np.outer(length, length)) / np.outer(length, length)
    meat = matrix.T @ ((weights**2)[:, None] * matrix)
    variance = np.diag(inverse @ meat @ inverse)
    return scale * np.sqrt(np.maximum(variance, 0.0)), condition

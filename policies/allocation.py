"""One choice per bucket: least total cost with a bound on the total of something else.

The knapsack problem with one item of every group. L-GreCo (Alimohammadi et al.) takes bytes for the
cost and squared error for what is bounded, Kimad+ (Xin et al.) the other way round. Both solve it
by dynamic programming over a discretised total; here sums stay exact, and Lagrangian bounds keep
their number small.

Shapes: B buckets, K choices per bucket.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

STATES = 2_000
"""Partial sums that are kept after every bucket; up to this many the answer is exact."""

ROUNDING = 1e-12
"""Share by which a total may exceed the budget: sums of floats depend on their order."""


class Allocation(NamedTuple):
    """The column of every row, (B,), and whether no other choice can cost less."""

    columns: Indices
    exact: bool


def allocate(
    costs: Floats, loads: Floats, budget: float, states: int = STATES
) -> Allocation | None:
    """Choose one column of every row: least total cost, total load within the budget.

    Dynamic programming over rows. A partial sum is dropped if another is no worse in cost and in
    load, or if no completion can cost less than a choice that is known already. Neither loses
    anything. If more than ``states`` remain, loads are binned and the cheapest sum of every bin is
    kept, as the published methods do.

    Args:
        costs: (B, K), non-negative; a pair with a NaN or infinity is no choice.
        loads: (B, K), non-negative.
        budget: Bound on the sum of loads.
        states: Most partial sums, at least 1.

    Returns:
        The choice, never more costly than the best single column that fits, taken for all rows;
        None if nothing fits.
    """
    limit = budget * (1 + ROUNDING)
    known = np.isfinite(costs) & np.isfinite(loads)
    if not len(costs) or not known.any(axis=1).all() or not np.isfinite(limit):
        return None
    costs, loads = np.where(known, costs, np.inf), np.where(known, loads, np.inf)
    if loads.min(axis=1).sum() > limit:
        return None
    price = _price(costs, loads, limit)
    priced = costs + price * np.where(known, loads, 0.0)
    floor = priced.min(axis=1)
    best = min(_starts(costs, loads, priced, limit), key=lambda row: _total(costs, row))
    # Whatever is chosen costs at least the sum of floors less price * limit, and on top of that
    # what its columns are above their floors.
    excess = priced - floor[:, None]
    gap = _total(costs, best) - (floor.sum() - price * limit)
    gap += 1e-9 * (abs(gap) + floor.sum())

    to_come = np.append(np.cumsum(loads.min(axis=1)[::-1])[::-1], 0.0)
    cost, load, over, exact = np.zeros(1), np.zeros(1), np.zeros(1), True
    trail: list[tuple[Indices, Indices]] = []
    for b in range(len(costs)):
        columns = np.flatnonzero(excess[b] <= gap)
        sums, taken, above = (
            (known_sum[:, None] + own[b, columns]).ravel()
            for known_sum, own in ((cost, costs), (load, loads), (over, excess))
        )
        fit = np.flatnonzero((taken + to_come[b + 1] <= limit) & (above <= gap))
        if not len(fit):
            return Allocation(best, exact)
        fit = fit[np.lexsort((taken[fit], sums[fit]))]
        lightest = np.minimum.accumulate(taken[fit])
        fit = fit[np.append(True, taken[fit][1:] < lightest[:-1])]
        if len(fit) > states:
            exact, fit = False, fit[_first_of_bins(taken[fit], states)]
        cost, load, over = sums[fit], taken[fit], above[fit]
        trail.append((fit // len(columns), columns[fit % len(columns)]))
    row = np.empty(len(costs), dtype=np.intp)
    at = 0  # sorted by cost
    for b in range(len(costs) - 1, -1, -1):
        before, columns = trail[b]
        row[b] = columns[at]
        at = int(before[at])
    return Allocation(row if _total(costs, row) < _total(costs, best) else best, exact)


def _total(values: Floats, row: Indices) -> float:
    return float(values[np.arange(len(row)), row].sum())


def _price(costs: Floats, loads: Floats, limit: float) -> float:
    """Return the least price of load at which the cheapest choice fits, to one part in 1e9."""

    def fits(price: float) -> bool:
        return _total(loads, _cheapest(costs, loads, price)) <= limit

    if fits(0.0):
        return 0.0
    high = 1.0
    while not fits(high) and high < 1e100:
        high *= 1e3
    low = high
    while fits(low) and low > 1e-100:
        low /= 1e3
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _cheapest(costs: Floats, loads: Floats, price: float) -> Indices:
    """Return the cheapest column of every row at a price of load; of equals the lightest."""
    known = np.isfinite(costs)
    priced = costs + price * np.where(known, loads, 0.0)
    least = priced.min(axis=1, keepdims=True)
    row: Indices = np.where(priced <= least, loads, np.inf).argmin(axis=1)
    return row


def _starts(costs: Floats, loads: Floats, priced: Floats, limit: float) -> list[Indices]:
    """Return choices that fit: by price or else by load, then improved; the best single column."""
    rows = np.arange(len(costs))
    row = np.where(priced <= priced.min(axis=1, keepdims=True), loads, np.inf).argmin(axis=1)
    if _total(loads, row) > limit:
        row = loads.argmin(axis=1)
    for _ in range(len(costs) * costs.shape[1]):
        more = loads - loads[rows, row][:, None]
        less = np.where(more <= limit - _total(loads, row), costs[rows, row][:, None] - costs, 0.0)
        b, k = np.unravel_index(int(less.argmax()), less.shape)
        if not less[b, k] > 0 or _total(loads, np.where(rows == b, k, row)) > limit:
            break
        row[b] = k
    whole = np.where(loads.sum(axis=0) <= limit, costs.sum(axis=0), np.inf)
    column = int(whole.argmin())
    uniform = [np.full(len(costs), column, dtype=np.intp)] if np.isfinite(whole[column]) else []
    return [row.astype(np.intp), *uniform]


def _first_of_bins(loads: Floats, bins: int) -> Indices:
    """Return the first of every bin between the least and the greatest load."""
    low, high = loads.min(), loads.max()
    number = np.minimum((loads - low) / (high - low) * bins, bins - 1).astype(np.intp)
    first: Indices = np.sort(np.unique(number, return_index=True)[1])
    return first

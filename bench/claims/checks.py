"""What a claim is made of: numbers with what they must be, and numbers that are only reported.

What is accepted is an interval, fixed by the expectation before anything is measured. A measured
value that is not a number lies in none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SEEDS = (0, 1, 2)
"""Seeds of every claim that trains or draws."""


@dataclass(frozen=True, slots=True)
class Check:
    """One number that a claim stands or falls with.

    Attributes:
        what: What was measured, with its unit if it has one.
        measured: What came out.
        expected: What the claim says.
        tolerance: How far from it is accepted, in words.
        low: Least value accepted.
        high: Greatest value accepted.
        note: Why it does not hold; shown if so.
    """

    what: str
    measured: float
    expected: float
    tolerance: str
    low: float
    high: float
    note: str = ""

    @property
    def holds(self) -> bool:
        """Return whether the measured value is accepted."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True)
class Figure:
    """A number without an expectation, reported beside the checks."""

    what: str
    measured: float
    note: str = ""


Finding = Check | Figure


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim and how it is tried.

    Attributes:
        key: Short name, ``T1`` to ``T17``.
        title: What is claimed.
        source: Where the expected values come from: ``paper`` (printed there), ``derived`` (follows
            from the definitions) or ``ours`` (a question that reviews of the papers left open).
        how: ``measured`` (the algorithms ran) or ``by model`` (the cost model computed it).
        findings: Tries it; its argument says whether to be quick, with fewer samples and steps.
    """

    key: str
    title: str
    source: str
    how: str
    findings: Callable[[bool], Iterable[Finding]]


def near(what: str, measured: float, expected: float, share: float, note: str = "") -> Check:
    """Expect a value within a share of itself: ``share`` 0.02 accepts 2 % more or less."""
    width = share * abs(expected)
    words = f"{100 * share:.3g} %"
    return Check(what, measured, expected, words, expected - width, expected + width, note)


def close(what: str, measured: float, expected: float, width: float, note: str = "") -> Check:
    """Expect a value within an absolute width."""
    low, high = expected - width, expected + width
    return Check(what, measured, expected, f"{width:.3g} absolute", low, high, note)


def exactly(what: str, measured: float, expected: float, note: str = "") -> Check:
    """Expect a count."""
    return Check(what, measured, expected, "exact", expected, expected, note)


def factor(what: str, measured: float, expected: float, times: float, note: str = "") -> Check:
    """Expect a positive value within a factor."""
    low, high = expected / times, expected * times
    return Check(what, measured, expected, f"factor {times:.3g}", low, high, note)


def at_most(what: str, measured: float, bound: float, note: str = "") -> Check:
    """Expect no more than a bound."""
    return Check(what, measured, bound, "at most", -math.inf, bound, note)


def at_least(what: str, measured: float, bound: float, note: str = "") -> Check:
    """Expect no less than a bound."""
    return Check(what, measured, bound, "at least", bound, math.inf, note)


def between(what: str, measured: float, low: float, high: float, note: str = "") -> Check:
    """Expect a value of a printed range; its middle stands as the expected value."""
    return Check(what, measured, (low + high) / 2, f"{low:.4g} to {high:.4g}", low, high, note)

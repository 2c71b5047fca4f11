"""How much our own all-reduces can leave out, and how many ranks are heard then.

The schedules belong to the agent, which policies do not import; a test holds the two together.

Letters: N ranks, S skipped steps.
"""

from __future__ import annotations

SKIPPING: tuple[str, ...] = ("ring", "halving_doubling", "tree")
"""Collectives whose reduce steps can be left out."""


def most_skipped(collective: str, n: int) -> int:
    """Return the most reduce steps that N ranks can leave out; 0 for collectives without skip."""
    if collective == "ring":
        return max(n - 1, 0)
    if collective == "tree":
        return max(n - 1, 0).bit_length()
    if collective == "halving_doubling" and n & (n - 1) == 0:
        return max(n.bit_length() - 1, 0)
    return 0


def contributions(collective: str, n: int, skip: int) -> int:
    """Return how many of N ranks are in every sum when ``skip`` steps are left out.

    Args:
        collective: Who carries the all-reduce.
        n: Ranks N.
        skip: Steps S, clamped to 0 .. ``most_skipped``.
    """
    skip = min(max(skip, 0), most_skipped(collective, n))
    if collective == "ring":
        return n - skip
    # Every step of the others halves them: ceil(N / 2^S).
    return -(-n // (1 << skip))

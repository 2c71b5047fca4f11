"""Non-finite gradients that came with a plan: counted, told apart from the model's own, undone.

A loss scaler overflows now and then under any plan; only overflows at several looks in a row count,
and only if the same did not happen without compression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradpilot.policies.dwell import whole
from gradpilot.policies.watches import Overflow
from gradpilot.protos.messages import DENSE, Option

LOOKS = 3
"""Looks in a row with overflows that condemn a plan."""

STEPS = 10
"""So many such steps condemn it after two looks already."""

BASELINE_STEPS = 2000
"""Overflows under dense plans excuse other plans for so many steps."""


def next_overflow(
    before: Overflow, count: int, step: int, present: Sequence[Option], left: Sequence[Option]
) -> Overflow:
    """Return what is known after another look.

    Args:
        before: After the look before.
        count: Steps with a non-finite gradient so far; -1 if unknown.
        step: Newest step.
        present: Distinct options in use; empty if unknown.
        left: Distinct options in use until the look before, if others were; else empty.
    """
    if count < 0:
        return before
    if left or not 0 <= before.count <= count:
        # What came on the way from one plan to the other is nobody's fault.
        after = replace(before, count=count, looks=0, steps=0)
        return _under(after, left, step) if left and before.looks else after
    if count == before.count:
        return replace(before, looks=0, steps=0)
    grown = count - before.count
    after = replace(before, count=count, looks=before.looks + 1, steps=before.steps + grown)
    return _under(after, present, step) if after.looks >= 2 else after


def alarm(now: Overflow, step: int, present: Sequence[Option]) -> str:
    """Return why the plan must go; empty if it need not."""
    enough = now.looks >= LOOKS or (now.looks >= 2 and now.steps >= STEPS)
    if not enough or not present or dense(present) or innocent(now, step, present):
        return ""
    return f"{now.steps} steps with non-finite gradients at {now.looks} looks in a row under it"


def innocent(now: Overflow, step: int, present: Sequence[Option]) -> bool:
    """Return whether the same happened without what the plan does: it is the model's own."""
    baseline = now.dense_step if whole(present) else now.whole_step
    return baseline >= 0 and step - baseline <= BASELINE_STEPS


def tell(now: Overflow, step: int, present: Sequence[Option]) -> list[str]:
    """Return for people that overflows are seen, but are not the plan's."""
    if now.looks == 0 or not (dense(present) or innocent(now, step, present)):
        return []
    return [
        f"{now.steps} steps with non-finite gradients, which come without compression as well:"
        " the model's own, or its loss scaler's"
    ]


def dense(options: Sequence[Option]) -> bool:
    """Return whether these options are fp32 all-reduces of everything."""
    return bool(options) and all(o.family == DENSE.family and not o.skip for o in options)


def _under(now: Overflow, options: Sequence[Option], step: int) -> Overflow:
    """Note overflows under these options."""
    if dense(options):
        return replace(now, dense_step=step, whole_step=step)
    return replace(now, whole_step=step) if options and whole(options) else now

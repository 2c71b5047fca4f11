"""The plans of one run: their numbers, the newest one, and those that reports may still name."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict

from gradpilot.policies.base import PolicySettings
from gradpilot.protos.messages import START_INTERVAL, Layout, Option, Plan

PLANS_KEPT = 8
"""Plans remembered, so that a report can be read under the plan that it names."""

PATIENCE_SECONDS = 30.0
"""Least time that ranks get to agree on a plan before it counts as lost."""

PATIENCE_DECISION_STEPS = 3
"""The same in decision steps of the plan; the longer of the two counts."""

MAX_NUMBER = 1 << 53
"""Numbers beyond it are nobody's; they must not push ours out of 64 bits."""

Key = tuple[int, int]


class PlanBook:
    """Plans of one run. The digest of its layout decides which of them can be used."""

    def __init__(self) -> None:
        self.next_id = 1
        """Number of the next decision: above all that was stored or that a rank holds."""
        self.newest: Plan | None = None
        """Newest plan for the present layout; what a rank that connects is told."""
        self._layout = ""
        self._plans: OrderedDict[Key, Plan] = OrderedDict()
        self._sent_at = -math.inf

    def get(self, key: Key | None) -> Plan | None:
        """Return the plan ``(term, id)`` if it is known and for the present layout."""
        plan = self._plans.get(key) if key is not None else None
        return plan if plan is not None and plan.layout == self._layout else None

    def remember(self, plan: Plan) -> None:
        """Learn of a plan, from the store or from a rank that holds it.

        A rank's own copy replaces ours: on the safe plan it says so under the number of the plan
        that it replaced.
        """
        self.number(plan.id)
        self._plans[plan.key] = plan
        self._plans.move_to_end(plan.key)
        if len(self._plans) > PLANS_KEPT:
            self._plans.popitem(last=False)
        if self.newest is not None and plan.layout == self._layout and plan.key >= self.newest.key:
            self.newest = plan

    def number(self, taken: int) -> None:
        """Make sure that the next number is above one that is taken."""
        if taken < MAX_NUMBER:
            self.next_id = max(self.next_id, taken + 1)

    def sent(self, plan: Plan, now: float) -> bool:
        """Take a plan that was just made; return whether it is for the present layout."""
        self.remember(plan)
        if plan.layout != self._layout:
            return False
        self.newest, self._sent_at = plan, now
        return True

    def void(self, key: Key, in_force: Plan | None) -> bool:
        """Give up the newest plan if it has this key; go back to the one in force."""
        if self.newest is None or self.newest.key != key:
            return False
        del self._plans[key]
        self.newest = in_force
        return True

    def use_layout(self, digest: str) -> None:
        """The run has this layout now; empty if it has none."""
        self._layout = digest
        fitting = [p for p in self._plans.values() if p.layout == digest]
        self.newest = max(fitting, key=lambda p: p.key, default=None)

    def clear(self) -> None:
        """Forget all plans but not their numbers."""
        self._plans.clear()
        self.newest = None

    def usable(self, key: Key, now: float, step_seconds: float) -> bool:
        """Return whether a window under this plan is worth a decision.

        While ranks are on the way to the newest plan it is not, unless the plan was lost.
        """
        if self.newest is None or key == self.newest.key:
            return True
        using = self._plans.get(key)  # ranks switch at a decision step of the plan that they leave
        interval = max(using.interval if using else START_INTERVAL, self.newest.interval)
        steps = PATIENCE_DECISION_STEPS * interval
        return now - self._sent_at > max(PATIENCE_SECONDS, steps * step_seconds)


def decision_interval(settings: PolicySettings, step_seconds: float) -> int:
    """Return the decision step N of a plan: ``interval`` steps, of slow ones fewer.

    Args:
        settings: For the bounds.
        step_seconds: Predicted or measured step time under the plan; nothing is made of one that
            is not a positive number.
    """
    if not 0 < step_seconds < math.inf:
        return settings.interval
    return max(1, min(settings.interval, round(settings.interval_seconds / step_seconds)))


def dominant(plan: Plan, layout: Layout | None) -> Option:
    """Return the option that most elements get."""
    if layout is None or not plan.assignments:
        return plan.options()[0]
    elements: Counter[Option] = Counter()
    for bucket in layout.buckets:
        elements[plan.option(bucket.fingerprint)] += bucket.elements
    return elements.most_common(1)[0][0]


def plan_label(plan: Plan) -> str:
    """Return a short name of a plan for people."""
    options = plan.options()
    more = f" and {len(options) - 1} more" if len(options) > 1 else ""
    return options[0].label + more

"""What became of the plans of a run: step times measured under each, and what ended it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gradpilot.protos.explanations import Since
from gradpilot.protos.messages import Decision

LOOKS = 32
"""Newest looks whose step times are kept; their median is told."""


class Aftermath:
    """Follows the plan in force and the one sent to follow it. Memory is bounded.

    Args:
        known: What is stored of the newest plan that the ranks took, and of the one after it.
    """

    def __init__(self, known: Sequence[Since] = ()) -> None:
        taken = [one for one in known if one.first_step >= 0]
        waiting = [one for one in known if one.first_step < 0]
        self._current = taken[-1] if taken else None
        self._next = waiting[-1] if waiting else None
        self._ended: dict[int, Since] = {}

    @staticmethod
    def begin(decision: Decision, before: str, before_seconds: float, undoes: str = "") -> Since:
        """Return what is known of a plan that will be sent to the ranks; see ``sent``.

        Args:
            decision: The decision with the plan.
            before: Plan in force, for people; empty if there is none.
            before_seconds: Step time measured under it; not positive if unknown.
            undoes: See ``Since``.
        """
        chosen, current = decision.chosen, decision.current
        return Since(
            id=decision.id,
            before=before,
            before_seconds=before_seconds if before_seconds > 0 else math.nan,
            before_efficiency=current.efficiency if current is not None else math.nan,
            predicted_seconds=chosen.step_seconds if chosen is not None else math.nan,
            predicted_efficiency=chosen.efficiency if chosen is not None else math.nan,
            undoes=undoes,
        )

    def sent(self, since: Since) -> None:
        """The plan was sent to the ranks, which may take it or not."""
        self._next = since

    def look(self, id_: int, first: int, last: int, seconds: float, gain: float) -> None:
        """Take what is measured under the plan in force.

        Args:
            id_: Its number.
            first: First step reported under it.
            last: Newest step.
            seconds: Step time; not positive if unknown.
            gain: Gain measured under it; -1 if unknown.
        """
        if self._next is not None and self._next.id == id_:
            if (old := self._current) is not None:
                cause = self._next.undoes
                end = "undone" if cause else "replaced"
                self._ended[old.id] = replace(old, end=end, cause=cause, ended_by=id_)
            self._current, self._next = self._next, None
        now = self._current
        if now is None or now.id != id_ or not seconds > 0 or last <= now.last_step:
            return
        self._current = replace(
            now,
            first_step=first if now.first_step < 0 else now.first_step,
            last_step=last,
            measured=(*now.measured, seconds)[-LOOKS:],
            gain=gain if gain >= 0 else now.gain,
        )

    def find(self, id_: int) -> Since | None:
        """Return what is known of the plan of a decision beyond what is stored."""
        return next((known for known in self.records() if known.id == id_), None)

    def records(self) -> tuple[Since, ...]:
        """Return what has to be stored."""
        live = (one for one in (self._current, self._next) if one is not None)
        return (*self._ended.values(), *live)

    def stored(self) -> None:
        """All of ``records`` are on disk; what ended need not be kept any longer."""
        self._ended.clear()

    def clear(self) -> None:
        """The job started again: what it runs now is no plan of ours."""
        self._current, self._next = None, None

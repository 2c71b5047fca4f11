"""Which plan is in force on this rank, and when that is asked again.

Plans and probes arrive from the client's thread at any time and are only held. What is in force
changes at one place, ``begin_step`` of a decision step, by an agreement of all ranks.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Protocol

import gradpilot
from gradpilot.errors import ConfigError
from gradpilot.protos.messages import START_PROBE, Ack, Layout, Plan, ProbeRequest
from gradpilot.protos.validate import validate_plan
from gradpilot.worker_agent.agreement import Agreement, Row, Verdict
from gradpilot.worker_agent.buckets import BucketTable
from gradpilot.worker_agent.nodes import Nodes
from gradpilot.worker_agent.plan import ActivePlan, safe_plan

log = logging.getLogger("gradpilot.agent")


class ControlPlane(Protocol):
    """What the coordinator needs of the connection to the controller; nothing in it may block."""

    def send_ack(self, ack: Ack) -> None:
        """Tell what became of a plan."""

    def layout_changed(self, table: BucketTable) -> None:
        """Tell that buckets are laid out anew."""

    def controller_lost(self) -> bool:
        """Return whether the controller has been away for longer than a plan's time to live."""


@dataclass(slots=True)
class CoordinatorCounters:
    """Events since the start."""

    switches: int = 0
    plans_held: int = 0
    plans_rejected: int = 0
    agreement_failures: int = 0


class Coordinator:
    """Holds what the controller proposes and puts it in force together with all other ranks.

    Args:
        plan: Plan to start with, the same on all ranks.
        world_size: Ranks N.
        device: Type of the device that holds the gradients.
        agreement: Exchange with the other ranks; None for a single rank, which agrees with itself.
        control_plane: Where acknowledgements go; None without a controller.
        nodes: Nodes by rank; None for one node of all ranks.
    """

    def __init__(
        self,
        plan: Plan,
        world_size: int,
        device: str,
        agreement: Agreement | None,
        control_plane: ControlPlane | None,
        nodes: Nodes | None = None,
    ) -> None:
        self.active = ActivePlan(plan, world_size, device, nodes)
        self.counters = CoordinatorCounters()
        self.switch_step = 0
        """Step at which the plan in force took effect."""
        self._world_size = world_size
        self._device = device
        self._nodes = nodes
        self._agreement = agreement
        self._control_plane = control_plane
        self._layout: Layout | None = None
        self._lock = threading.Lock()
        self._held: Plan | None = None
        self._probe: ProbeRequest | None = None
        self._refused: tuple[int, int] = (0, 0)
        self._last_probe = 0
        self._verdict: Verdict | None = None

    # --- from the client's thread --------------------------------------------------------------

    def offer(self, plan: Plan) -> None:
        """Hold a plan until the next decision step; an older one than held or in force is ignored.

        Raises:
            ProtocolError: The plan does not fit this layout or these ranks.
            ConfigError: An option is unknown here or out of bounds.
        """
        with self._lock:
            newest = max(
                self._held.key if self._held else (0, 0), self.active.plan.key, self._refused
            )
            if plan.key <= newest:
                return
        self.check(plan)
        with self._lock:
            self._held = plan
            self.counters.plans_held += 1

    def reject(self) -> None:
        """Count a plan that ``offer`` refused."""
        with self._lock:
            self.counters.plans_rejected += 1

    def request_probe(self, probe: ProbeRequest) -> None:
        """Hold a probe until all ranks hold it."""
        with self._lock:
            if probe.id > self._last_probe:
                self._probe = probe

    def check(self, plan: Plan) -> None:
        """Raise if this rank cannot carry the plan out.

        Raises:
            ProtocolError: The plan does not fit this layout or these ranks.
            ConfigError: An option is unknown here or out of bounds.
        """
        layout = self._layout
        if layout is None:
            raise ConfigError("no plan can be held before the first step has shown the buckets")
        validate_plan(plan, layout, self._world_size)
        ActivePlan(plan, self._world_size, self._device, self._nodes)

    # --- from the gradient path ----------------------------------------------------------------

    def begin_step(self, step: int) -> ProbeRequest | None:
        """Put in force what the exchange begun at the end of the last step agreed on.

        Returns:
            A probe that all ranks run now, or None.

        Raises:
            AgreementLostError: This rank cannot learn the verdict and must not go on.
        """
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            if self._agreement is None:
                return None
            verdict = self._agreement.finish()
        if verdict.error:
            self.counters.agreement_failures += 1
            log.error("plans are frozen from step %d on: %s", step, verdict.error)
        if verdict.rejected:
            self._drop_held(verdict.rejected, step)
        if verdict.plan is not None:
            self._switch(verdict.plan, step)
        elif verdict.safe:
            log.warning("no controller for too long: falling back to the safe plan at %d", step)
            self._switch(safe_plan(self.active.plan), step)
        if verdict.probe is not None:
            with self._lock:
                if verdict.probe == START_PROBE:  # its number is nobody's
                    self._probe = None if self._probe == START_PROBE else self._probe
                else:
                    self._last_probe = verdict.probe.id
                    if self._probe is not None and self._probe.id <= self._last_probe:
                        self._probe = None
        return verdict.probe

    def end_step(self, next_step: int, table: BucketTable, layout_changed: bool) -> None:
        """Begin an exchange if the next step is a decision step; never waits."""
        if layout_changed:
            self._layout = table.layout
            with self._lock:
                if self._held is not None and self._held.layout != self._digest:
                    self._held = None
            if self._control_plane is not None:
                self._control_plane.layout_changed(table)
        if self.active.plan.steps_to_decision(next_step):
            return
        with self._lock:
            held, probe = self._held, self._probe
        row = Row(
            step=next_step,
            version=gradpilot.__version__,
            layout=self._digest,
            active=self.active.plan.key,
            held=held,
            controller_lost=self._controller_lost(),
            probe=probe,
        )
        if self._agreement is not None:
            self._agreement.start(row)
        else:
            self._verdict = Verdict(
                plan=held,
                safe=held is None and row.controller_lost,
                probe=probe if held is None and not row.controller_lost else None,
            )

    def restore(self, plan: Plan) -> None:
        """Put a plan in force without agreement: from a checkpoint, on all ranks alike."""
        self.active = ActivePlan(plan, self._world_size, self._device, self._nodes)

    def close(self) -> bool:
        """Stop exchanging; the plan in force stays.

        Returns:
            Whether the exchange at hand ended.
        """
        agreement, self._agreement = self._agreement, None
        return agreement is None or agreement.close()

    @property
    def frozen(self) -> str:
        """Return why plans no longer change, "" if they may."""
        return self._agreement.frozen if self._agreement is not None else ""

    # -------------------------------------------------------------------------------------------

    @property
    def _digest(self) -> str:
        return self._layout.digest if self._layout is not None else ""

    def _controller_lost(self) -> bool:
        if self._control_plane is None or self.active.plan.policy == "safe":
            return False
        return not self._is_dense() and self._control_plane.controller_lost()

    def _is_dense(self) -> bool:
        return self.active.native and not self.active.feedback

    def _switch(self, plan: Plan, step: int) -> None:
        self.active = ActivePlan(plan, self._world_size, self._device, self._nodes)
        self.switch_step = step
        self.counters.switches += 1
        with self._lock:
            if self._held is not None and self._held.key <= plan.key:
                self._held = None
        self._acknowledge(Ack(plan.term, plan.id, "agreed", step))

    def _drop_held(self, reason: str, step: int) -> None:
        with self._lock:
            held, self._held = self._held, None
            if held is not None:
                self._refused = max(self._refused, held.key)
            self.counters.plans_rejected += 1
        log.warning("a plan was turned down at step %d: %s", step, reason)
        if held is not None:
            self._acknowledge(Ack(held.term, held.id, "rejected", step, reason))

    def _acknowledge(self, ack: Ack) -> None:
        if self._control_plane is not None:
            self._control_plane.send_ack(ack)

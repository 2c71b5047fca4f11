"""The handle of a model under control, and the end of all handles at exit."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from gradpilot.errors import ConfigError
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import (
    DENSE,
    Counters,
    Layout,
    Plan,
)
from gradpilot.worker_agent import embedded, groups, identity
from gradpilot.worker_agent.buckets import BucketTable
from gradpilot.worker_agent.config import AgentConfig
from gradpilot.worker_agent.controller_link import ControllerLink
from gradpilot.worker_agent.coordinator import Coordinator
from gradpilot.worker_agent.distributed_checkpoint import RankState
from gradpilot.worker_agent.folding import fold
from gradpilot.worker_agent.hook import Pipeline
from gradpilot.worker_agent.reporting import WindowRecorder
from gradpilot.worker_agent.teardown import settle
from gradpilot.worker_agent.watchdog import Watchdog

log = logging.getLogger("gradpilot.agent")

CHILD_SECONDS = 0.9
"""How long the exit may wait for an embedded controller to end."""

STATE_VERSION = 3
"""Version of ``Handle.state_dict``; raised when an old reader could misread it."""

_open: set[Handle] = set()
"""Kept here, since a script may drop its handle and still has to end in good order."""


_attached: list[str] = []
"""Models that were attached in this process, so that the exit takes its moment."""


class Handle:
    """A model under control. Made by ``attach``; its methods never wait for the controller.

    Attributes:
        run: Run id.
        model: Name of the model within the run.
        controller: Address of the controller, "" without one.
        metrics_url: Where an embedded controller serves its metrics, "" otherwise.
    """

    def __init__(
        self,
        *,
        job: identity.Job,
        config: AgentConfig,
        pipeline: Pipeline,
        coordinator: Coordinator,
        recorder: WindowRecorder,
        table: BucketTable,
        link: ControllerLink | None,
        child: embedded.EmbeddedController | None,
        owned: tuple[dist.ProcessGroup, ...],
        addresses: tuple[str, str],
        watchdog: Watchdog | None = None,
    ) -> None:
        self.run = job.run
        self.model = config.model
        self.controller, self.metrics_url = addresses
        self._pipeline = pipeline
        self._coordinator = coordinator
        self._recorder = recorder
        self._table = table
        self._link = link
        self._child = child
        self._groups = owned
        self._watchdog = watchdog
        self._rank = dist.get_rank(owned[0])
        self._closed = False

        _open.add(self)
        _attached.append(config.model)

    @property
    def plan(self) -> Plan:
        """Return the plan in force."""
        return self._coordinator.active.plan

    @property
    def step(self) -> int:
        """Return the number of synchronised backward passes so far."""
        return self._pipeline.step

    @property
    def rank(self) -> int:
        """Return this rank within the model's process group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the model's process group."""
        return self._pipeline.world_size

    @property
    def layout(self) -> Layout | None:
        """Return the present bucket layout; None before the first step."""
        return self._table.layout

    @property
    def frozen(self) -> str:
        """Return why plans no longer change, "" if they may."""
        return self._coordinator.frozen

    @property
    def counters(self) -> Counters:
        """Return the events since the agent was attached."""
        return counters_of(self._pipeline, self._coordinator, self._link)

    def observe(self, *, loss: float | None = None, lr: float | None = None) -> None:
        """Tell the controller the newest loss and learning rate; optional, never waits."""
        self._recorder.observe(loss=loss, lr=lr)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank must hold; loads with ``weights_only=True``.

        Residuals differ between ranks, so every rank saves its own. Call between two steps. For
        ``torch.distributed.checkpoint`` take ``rank_state``.
        """
        self._pipeline.settle()
        return {
            "version": STATE_VERSION,
            "world_size": self._pipeline.world_size,
            "rank": self._rank,
            "step": self._pipeline.step,
            "loss_scale": self._pipeline.loss_scale.value,
            "plan": to_json(self.plan),
            "residuals": self._pipeline.residuals.state_dict(),
            "memories": self._pipeline.memories.state_dict(),
        }

    def rank_state(self, saved_by: int | None = None) -> RankState:
        """Return what ``torch.distributed.checkpoint`` can save and load of this rank.

        Args:
            saved_by: To load: number of ranks that saved, if that is not as many as there are now.
        """
        return RankState(self, self._rank, saved_by)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from ``state_dict``; all ranks alike, before the first step.

        With as many ranks as before, each rank loads what it saved. With another number, load a
        list of what *all* ranks saved, on every rank: residuals are then folded so that their sum
        over the ranks is kept (``folding``), and sent with the next step. From less than all they
        are dropped, and counted in ``counters.residual_resets``.

        Raises:
            ConfigError: A state is of another version, or the states are not of one checkpoint.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states or [{}]:
            if one.get("version") != STATE_VERSION:
                raise ConfigError(
                    f"expected agent state of version {STATE_VERSION}, got {one.get('version')!r};"
                    " load it with the gradpilot that saved it, or start without it"
                )
        own = [one for one in states if len(states) == 1 or one.get("rank") == self._rank]
        if states[0]["world_size"] == self._pipeline.world_size and own:
            self._resume(own[0])
        else:
            self._resize(states)

    def _resume(self, state: Mapping[str, Any]) -> None:
        self._pipeline.step = int(state["step"])
        self._coordinator.restore(from_json(Plan, state["plan"]))
        self._pipeline.loss_scale.restore(float(state["loss_scale"]))
        self._pipeline.residuals.load_state_dict(state["residuals"])
        self._pipeline.memories.load_state_dict(state["memories"])

    def _resize(self, states: Sequence[Mapping[str, Any]]) -> None:
        world_size, first = self._pipeline.world_size, states[0]
        self._pipeline.step = int(first["step"])
        if (
            len(states) == 1 < first["world_size"]
        ):  # of an unknown rank, perhaps: every rank has its own in hand
            dropped, missing = len(first["residuals"]), "all other ranks"
        else:
            folded = fold(states, self._rank, world_size)
            dropped, missing = folded.dropped, f"ranks {', '.join(map(str, folded.missing))}"
            if not folded.missing:
                missing = ""
                self._pipeline.loss_scale.restore(float(first["loss_scale"]))
                self._pipeline.residuals.load_state_dict(folded.residuals)
        self._pipeline.residuals.resets += dropped
        if missing:
            log.warning(
                "the checkpoint is of %s ranks, this job has %d, and the states of %s were not"
                " loaded: %d residuals were dropped",
                first["world_size"],
                world_size,
                missing,
                dropped,
            )
        # Skips and bounds depend on the world size, so start dense; ids go on from there.
        plan = from_json(Plan, first["plan"])
        self._coordinator.restore(replace(plan, assignments=(), default=DENSE))

    def detach(self) -> None:
        """Go back to plain DDP: dense all-reduce on DDP's own group, no threads, no controller.

        Call on all ranks between the same two steps. DDP keeps the hook, which does nothing but
        what DDP did; a residual is sent with the next step.
        """
        if self._closed:
            return
        self._coordinator.restore(replace(self.plan, assignments=(), default=DENSE))
        self.close()

    def close(self) -> None:
        """Stop threads and connection within 2 s; called at exit for what is still open."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        if self._watchdog is not None:  # first: ending the rest is no stall
            self._watchdog.close()
        agreed = self._coordinator.close()
        if self._link is not None:
            self._link.close()  # with the line below at most 1.5 s, mostly 0.5
        idle = self._pipeline.close()
        if self._child is not None:
            self._child.stop(CHILD_SECONDS)
        if idle and agreed:
            for group in self._groups:
                groups.release(group)


def counters_of(
    pipeline: Pipeline, coordinator: Coordinator, link: ControllerLink | None
) -> Counters:
    """Return the events since the agent was attached, from whoever counts them."""
    events = coordinator.counters
    return Counters(
        steps=pipeline.step,
        switches=events.switches,
        nonfinite_steps=pipeline.nonfinite_steps,
        residual_resets=pipeline.residuals.resets,
        reports_dropped=link.client.dropped if link is not None else 0,
        plans_rejected=events.plans_rejected,
        plans_held=events.plans_held,
        wire_bytes=pipeline.wire_bytes,
        dense_bytes=pipeline.dense_bytes,
        agreement_failures=events.agreement_failures,
    )


def close_all() -> None:
    """Close every handle of this process; runs at exit by itself."""
    for handle in list(_open):
        handle.close()


@atexit.register
def _leave() -> None:
    used = bool(_open) or _attached
    close_all()
    groups.destroy_free()
    if used:
        settle()

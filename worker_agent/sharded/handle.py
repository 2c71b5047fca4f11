"""The handle of a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Counters, Layout, Plan
from gradpilot.worker_agent import handle
from gradpilot.worker_agent.config import AgentConfig
from gradpilot.worker_agent.sharded.pipeline import ShardedPipeline
from gradpilot.worker_agent.sharded.reports import NOT_PLANNED, Reporter
from gradpilot.worker_agent.sharded.steps import Steps

STATE_VERSION = 1
"""Version of ``ShardedHandle.state_dict``."""


class ShardedHandle(handle.Handle):
    """A sharded model under control. Made by ``attach``.

    No controller plans sharded models yet: the plan is what the caller fixed. ``frozen`` says so.

    Attributes:
        observes: Why the model is only observed and reduced as the framework does, "" if not.
        weights: Counts of the all-gathers of weights; None if they are all in full.
    """

    def __init__(
        self,
        *,
        config: AgentConfig,
        reporter: Reporter,
        pipeline: ShardedPipeline,
        plan: Plan,
        layout: Layout,
        world_size: int,
        observes: str,
        observe: Callable[..., None],
        weights: Any = None,
    ) -> None:
        self.run = reporter.run
        self.model = config.model
        self.controller, self.metrics_url = reporter.address, ""
        self.observes = observes
        self.weights = weights
        self._sharded = pipeline
        self._steps = pipeline.steps
        self._plan = plan
        self._units = layout
        self._ranks = world_size
        self._rank = dist.get_rank()
        self._observe = observe
        self._reporter = reporter
        handle._open.add(self)

    @property
    def plan(self) -> Plan:
        """Return the plan in force."""
        return self._plan

    @property
    def step(self) -> int:
        """Return the number of backward passes that reduced gradients."""
        return self._steps.number

    @property
    def layout(self) -> Layout | None:
        """Return the units as buckets."""
        return self._units

    @property
    def frozen(self) -> str:
        """Return why plans do not change."""
        return self.observes or NOT_PLANNED

    @property
    def warm(self) -> bool:
        """Return whether contributions may be skipped by now."""
        return self._steps.warm_up.warm

    @property
    def counters(self) -> Counters:
        """Return the events since the agent was attached."""
        return counters_of(self._steps)

    def observe(self, *, loss: float | None = None, lr: float | None = None) -> None:
        """Note the newest loss and learning rate for reports."""
        self._observe(loss=loss, lr=lr)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of this rank must hold; loads with ``weights_only=True``.

        Residuals are of the size of this rank's unsharded gradient. Call between two steps.
        """
        return {
            "version": STATE_VERSION,
            "world_size": self._ranks,
            "rank": self._rank,
            "step": self._steps.number,
            "loss_scale": self._steps.loss_scale.value,
            "residuals": self._steps.residuals.state_dict(),
            "memories": self._steps.memories.state_dict(),
            "warm_up": self._steps.warm_up.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from ``state_dict``; all ranks alike, before the first step.

        Of a list, each rank takes what it saved itself. With another world size the shards are
        others: residuals are dropped and counted.

        Raises:
            ConfigError: The state is of another version, or of a model that is not sharded.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        own = [one for one in states if len(states) == 1 or one.get("rank") == self._rank]
        saved: Mapping[str, Any] = own[0] if own else {}
        if saved.get("version") != STATE_VERSION or "warm_up" not in saved:
            raise ConfigError(
                f"expected this rank's state of a sharded model, version {STATE_VERSION},"
                f" got version {saved.get('version')!r}"
            )
        steps = self._steps
        steps.number = int(saved["step"])
        steps.warm_up.load_state_dict(saved["warm_up"])
        if saved["world_size"] != self._ranks:
            steps.residuals.resets += len(saved["residuals"])
            return
        steps.loss_scale.restore(float(saved["loss_scale"]))
        steps.residuals.load_state_dict(saved["residuals"])
        steps.memories.load_state_dict(saved["memories"])

    def detach(self) -> None:
        """Go back to the framework's own reduction; a residual is sent with the next step."""
        self._sharded.detach()

    def close(self) -> None:
        """End the connection to the controller; called at exit if it is still open."""
        handle._open.discard(self)
        self._reporter.close()


def counters_of(steps: Steps) -> Counters:
    """Return the events since the agent was attached."""
    return Counters(
        steps=steps.number,
        nonfinite_steps=steps.nonfinite,
        residual_resets=steps.residuals.resets,
        wire_bytes=steps.wire_bytes,
        dense_bytes=steps.dense_bytes,
    )


def spoil_gradients(model: nn.Module) -> None:
    """Make this rank's gradients NaN, as they are on the rank that caused it."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            with torch.no_grad():
                local.fill_(float("nan"))

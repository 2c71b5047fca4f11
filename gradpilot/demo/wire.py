"""The emulated link: a driver that makes every collective last as long as the cost model says."""

from __future__ import annotations

import time

import torch.distributed as dist

from gradpilot.demo.schedule import Schedule
from gradpilot.policies.cost import coefficients
from gradpilot.worker_agent.compressors.base import At
from gradpilot.worker_agent.wire import Wire


class EmulatedWire(Wire):
    """Carries collectives out over loopback and then waits as long as the link would have taken.

    This needs no privileges. It is an emulation: the time of a collective is
    ``a * alpha + b * bytes * beta`` by the very coefficients that the controller fits the link with
    (``policies.cost``), so the demo shows what the controller does on a link that follows the
    model, not that real links follow it. The loopback transfer itself comes on top; it is what a
    "fast" link really costs here.

    Args:
        group: Process group that carries the gradients.
        schedule: Link by step.
    """

    emulated = True

    def __init__(self, group: dist.ProcessGroup, schedule: Schedule) -> None:
        super().__init__(group)
        self._schedule = schedule
        self._backend = dist.get_backend(group)

    def link_seconds(self, kind: str, size: int, skip: int, step: int) -> float:
        """Return how long a collective takes on the link of a step.

        Args:
            kind: One of ``messages.COLLECTIVES``.
            size: Payload bytes that one rank hands in.
            skip: Ring steps left out.
            step: Step number.
        """
        phase = self._schedule.at(step)
        alphas, payloads = coefficients(kind, self.world_size, skip, self._backend)
        return alphas * phase.latency_seconds + payloads * size * phase.beta

    def _settle(self, kind: str, size: int, skip: int, at: At) -> None:
        time.sleep(self.link_seconds(kind, size, skip, at.step))

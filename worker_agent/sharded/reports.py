"""What a sharded model tells a controller: who is there, its units, and what was measured.

No controller plans sharded models yet, so the catalog names no compressor that it could choose, and
a plan that comes anyhow is turned down. No controller is started for this alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Catalog, Hello, Layout, Plan, Report
from gradpilot.worker_agent import groups, identity
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import OFF, AgentConfig
from gradpilot.worker_agent.controller_link import CLIENT_SECONDS
from gradpilot.worker_agent.meeting import meet

NOT_PLANNED = "no controller plans sharded models yet; the caller fixed the plan"


class Reporter:
    """The connection of one sharded model on one rank, if a controller is configured.

    Every rank must make one at the same point.

    Args:
        config: Settings.
        whole: Whether the model spans all ranks of the job; parts of a job would be taken for one
            another, so they do not report.
        device: Type of the device that holds the gradients.
        plan: The plan that the caller fixed.
        layout: The units as buckets.

    Attributes:
        run: Run id, the same on all ranks.
        address: Address of the controller, "" without one.
    """

    def __init__(
        self,
        config: AgentConfig,
        whole: bool,
        device: str,
        plan: Plan,
        layout: Layout,
    ) -> None:
        self.step: Callable[[], int] = lambda: 0
        self._client: ControllerClient | None = None
        place = identity.place(os.environ)
        if not whole:
            self.run, self.address = identity.propose(os.environ, config.run).run, ""
            return
        world_size = dist.get_world_size()
        assert dist.group.WORLD is not None
        groups.begin(dist.group.WORLD)
        met = meet(
            replace(config, controller=OFF) if config.embedded else config, list(range(world_size))
        )
        self.run, self.address = met.job.run, met.address
        if not met.address:
            return

        def hello() -> Hello:
            return identity.hello(
                met.job,
                place,
                model=config.model,
                rank=dist.get_rank(),
                world_size=world_size,
                backend=dist.get_backend(),
                device=device,
                step=self.step(),
                plan=plan,
            )

        self._client = ControllerClient(met.address, hello, config, world_size=world_size)
        self._client.set_catalog(Catalog(layout, ()))
        self._client.start(on_plan=_turn_down)

    def send(self, report: Report) -> None:
        """Hand a window report in; never waits."""
        if self._client is not None:
            self._client.send_report(report)

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close(CLIENT_SECONDS)


def _turn_down(_: Plan) -> None:
    raise ConfigError(NOT_PLANNED)

"""What the agent's parts say to the controller, without knowing of a connection."""

from __future__ import annotations

from gradpilot.protos.messages import Ack, Catalog, ComputeSample, Report
from gradpilot.worker_agent.buckets import BucketTable
from gradpilot.worker_agent.catalog import abilities, families
from gradpilot.worker_agent.client import ControllerClient

CLIENT_SECONDS = 0.6
"""How long the exit may wait for the connection to end."""


class ControllerLink:
    """The connection to the controller as the coordinator and the pipeline see it.

    Args:
        client: The connection.
        calibration: Measured cost of the compressors, part of every catalog.
        layered: Whether there are several nodes with several ranks.
        ttl: Seconds of silence after which the controller counts as lost.
    """

    def __init__(
        self,
        client: ControllerClient,
        calibration: tuple[ComputeSample, ...],
        layered: bool,
        ttl: float,
    ) -> None:
        self.client = client
        self.ttl_seconds = ttl
        self._calibration = calibration
        self._layered = layered

    def send_ack(self, ack: Ack) -> None:
        """Tell what became of a plan; never waits."""
        self.client.send_ack(ack)

    def send_report(self, report: Report) -> None:
        """Hand a window report in; never waits."""
        self.client.send_report(report)

    def layout_changed(self, table: BucketTable) -> None:
        """Send the catalog of the new layout; never waits."""
        assert table.layout is not None
        world_size = self.client.world_size
        self.client.set_catalog(
            Catalog(
                table.layout,
                families(table.slots, world_size),
                self._calibration,
                abilities(world_size, self._layered),
            )
        )

    def controller_lost(self) -> bool:
        """Return whether the controller has been silent for longer than a plan lives."""
        return self.client.seconds_since_contact() > self.ttl_seconds

    def close(self) -> None:
        """End the connection."""
        self.client.close(CLIENT_SECONDS)

"""Fixtures of a rank's connection to a controller."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gradpilot.protos.messages import Catalog
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import AgentConfig
from tests.worker_agent.controllers import CATALOG, FakeController, Rank, Start


@pytest.fixture
def no_early_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests need grpc themselves, and may have it first."""
    monkeypatch.setattr("gradpilot.worker_agent.GRPC_IMPORTED_EARLY", False)


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def controller() -> Iterator[FakeController]:
    with FakeController() as fake:
        yield fake


@pytest.fixture
def start(rank: Rank, no_early_import: None) -> Iterator[Start]:
    """Return a function that starts a client; all are closed in the end."""
    clients: list[ControllerClient] = []

    def begin(
        address: str,
        *,
        reports: int = 64,
        timeout: float = 2.0,
        catalog: Catalog | None = CATALOG,
        **callbacks: Any,
    ) -> ControllerClient:
        config = AgentConfig(queue_reports=reports, control_timeout_seconds=timeout)
        client = ControllerClient(address, rank.hello, config, world_size=2)
        clients.append(client)
        if catalog is not None:
            client.set_catalog(catalog)
        client.start(**callbacks)
        return client

    yield begin
    for client in clients:
        client.close()


@pytest.fixture
def dead_address() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def mute_address() -> Iterator[str]:
    """An address where connections are accepted and nothing is ever said, as if stopped."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"127.0.0.1:{listener.getsockname()[1]}"

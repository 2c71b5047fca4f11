from __future__ import annotations

import httpx
import pytest

from tests.controller.fakes import serving

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_probes_and_formats() -> None:
    async with serving() as controller, httpx.AsyncClient() as client:
        base = f"http://127.0.0.1:{controller.http_port}"
        assert (await client.get(f"{base}/healthz")).text == "ok\n"
        ready = await client.get(f"{base}/readyz")
        assert (ready.status_code, ready.text) == (200, "ok\n")
        plain = await client.get(f"{base}/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        open_metrics = await client.get(f"{base}/metrics", headers=accept)
        assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
        assert open_metrics.text.endswith("# EOF\n")
        assert (await client.get(f"{base}/nothing")).status_code == 404


async def test_a_failing_store_is_not_ready_but_alive() -> None:
    async with serving() as controller, httpx.AsyncClient() as client:
        base = f"http://127.0.0.1:{controller.http_port}"
        controller.store.failure = "disk full"
        ready = await client.get(f"{base}/readyz")
        assert (ready.status_code, ready.text) == (503, "disk full\n")
        assert (await client.get(f"{base}/healthz")).status_code == 200

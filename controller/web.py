"""HTTP beside gRPC, in the same loop: /metrics, /healthz, /readyz."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


def application(metrics: CollectorRegistry, not_ready: Callable[[], str]) -> Starlette:
    """Return the ASGI application.

    Args:
        metrics: What /metrics shows.
        not_ready: Why no traffic should come; empty if it should.
    """

    async def show_metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics), headers={"content-type": content_type})

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        why = not_ready()
        return PlainTextResponse(f"{why or 'ok'}\n", status_code=503 if why else 200)

    return Starlette(
        routes=[
            Route("/metrics", show_metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
        ]
    )


def web_server(app: Starlette) -> uvicorn.Server:
    """Return a server for the application that leaves signals and logging to us."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
    )
    # It would take SIGTERM from the drain.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    return server

"""The controller process: gRPC and HTTP in one loop; start, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gradpilot import __version__
from gradpilot.controller import logs
from gradpilot.controller.config import ControllerConfig, load, split_address, state_path
from gradpilot.controller.latency import keep_the_loop_free
from gradpilot.controller.metrics import ServerStats, registry
from gradpilot.controller.operators import Operators
from gradpilot.controller.planner import Planner
from gradpilot.controller.runs import Runs
from gradpilot.controller.servicer import ControllerServicer, OperatorServicer
from gradpilot.controller.sessions import Sessions
from gradpilot.controller.solver import Solver, SolverError
from gradpilot.controller.store import Store
from gradpilot.controller.views import to_store
from gradpilot.controller.web import application, web_server
from gradpilot.errors import ConfigError, GradpilotError
from gradpilot.policies.base import POLICIES
from gradpilot.protos.messages import GoingAway, Welcome
from gradpilot.protos.transport import ALL_SERVICES, SERVER_OPTIONS
from gradpilot.protos.v1 import (
    controller_pb2_grpc,
    operator_pb2_grpc,
)

logger = logging.getLogger(__name__)

SERVICES = ("gradpilot.v1.ControllerService", "gradpilot.v1.OperatorService")

RECONNECT_SECONDS = 2.0
"""When agents should look for us after we went away."""

STOP_SECONDS = 2.0
"""Longest wait for one of our own tasks to end."""

PARENT_SECONDS = 1.0
"""Time between two looks whether the parent process is there."""


class Controller:
    """One controller. ``async with`` it, or ``start`` and ``stop`` it.

    Args:
        config: Settings.
        solver: Where policies run; a process of their own by default.
    """

    def __init__(self, config: ControllerConfig, solver: Solver | None = None) -> None:
        self.config = config
        self.id = uuid.uuid4().hex
        self.grpc_port = 0
        self.http_port = 0
        self.store = Store(state_path(config), config.decisions_kept)
        self.runs = Runs(config.max_runs, config.run_grace_seconds)
        self.sessions = Sessions(self.runs, self.store, self._welcome)
        self.solver = solver or Solver(config.decision_timeout_seconds)
        self.planner = Planner(config, self.runs, self.store, self.sessions, self.solver)
        self._servicer = ControllerServicer(self.sessions)
        self._health = health.aio.HealthServicer()
        self.metrics = registry(
            self.runs,
            ServerStats(
                sessions=lambda: len(self.sessions),
                term=lambda: self.store.term,
                solver_restarts=lambda: self.solver.restarts,
                sessions_refused=self._servicer.refused,
            ),
        )
        self._web = web_server(application(self.metrics, self._not_ready))
        self._grpc: grpc.aio.Server | None = None
        self._http: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._state = "starting"
        self._announced = False

    async def start(self) -> None:
        """Bind both ports and serve.

        Raises:
            ConfigError: A port is taken, an address cannot be bound.
            StoreError: The state file is in use or unreadable.
        """
        try:
            self._listener = _listen(self.config.http_address)
            self.http_port = self._listener.getsockname()[1]
            await self.store.open()
            self._grpc = self._build()
            self.grpc_port = _bind(self._grpc, self.config.grpc_address)
            self._http = asyncio.create_task(self._web.serve(sockets=[self._listener]), name="web")
            await self._grpc.start()
            self._tasks.append(asyncio.create_task(self.planner.serve(), name="planner"))
            self._tasks.append(asyncio.create_task(self._warm_up(), name="warm-up"))
            for service in (ALL_SERVICES, *SERVICES):
                await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
            while not self._web.started and not self._http.done():
                await asyncio.sleep(0.01)
            if not self._web.started:
                raise ConfigError(f"the HTTP server at {self.config.http_address} did not start")
            self._write_ready_file()
        except BaseException:
            await self.stop("start failed", grace=0)
            raise
        self._state = ""
        logger.info(
            "ready",
            extra={
                "version": __version__,
                "controller": self.id,
                "term": self.store.term,
                "grpc": f"{split_address(self.config.grpc_address)[0]}:{self.grpc_port}",
                "http": f"{split_address(self.config.http_address)[0]}:{self.http_port}",
                "state": self.store.path,
                "policy": self.config.policy,
            },
        )

    async def stop(self, reason: str = "stopping", grace: float | None = None) -> None:
        """Drain: no longer ready, tell the agents, end the calls, flush, stop HTTP last."""
        if self._state == "stopped":
            return
        self._state = "draining"
        logger.info("going away", extra={"reason": reason, "sessions": len(self.sessions)})
        if self._grpc is not None:
            with contextlib.suppress(Exception):
                await self._health.enter_graceful_shutdown()
            self.sessions.say_goodbye(GoingAway(reason, RECONNECT_SECONDS))
            await self._grpc.stop(self.config.drain_seconds if grace is None else grace)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_SECONDS)
        self.solver.close()
        for run in self.runs:
            with contextlib.suppress(GradpilotError):
                await self.store.save_run(to_store(run))
                await self.store.save_since(run.run, run.model, run.aftermath.records())
        await self.store.close()
        self._web.should_exit = True
        if self._http is not None:
            await asyncio.wait([self._http], timeout=STOP_SECONDS)
        if self._listener is not None:
            self._listener.close()
        self._remove_ready_file()
        self._state = "stopped"
        logger.info("stopped", extra={"reason": reason})

    async def __aenter__(self) -> Controller:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _build(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self._servicer, server)
        operators = Operators(self.runs, self.store, self.sessions, self.planner)
        operator_pb2_grpc.add_OperatorServiceServicer_to_server(OperatorServicer(operators), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    def _welcome(self) -> Welcome:
        return Welcome(
            controller=self.id,
            term=self.store.term,
            report_seconds=self.config.report_seconds,
            plan_ttl_seconds=self.config.plan_ttl_seconds,
        )

    def _not_ready(self) -> str:
        return self._state or self.store.failure

    async def _warm_up(self) -> None:
        try:
            await self.solver.start()
        except SolverError as error:
            logger.error("%s; every decision will try again", error)

    def _write_ready_file(self) -> None:
        if not self.config.ready_file:
            return
        path = Path(self.config.ready_file)
        content = {"grpc_port": self.grpc_port, "http_port": self.http_port, "pid": os.getpid()}
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)
        self._announced = True

    def _remove_ready_file(self) -> None:
        if self._announced:
            with contextlib.suppress(OSError):
                Path(self.config.ready_file).unlink()


async def serve(config: ControllerConfig) -> None:
    """Run a controller until SIGTERM, SIGINT or the end of the parent; a second signal is final."""
    controller = Controller(config)
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_signal(number: signal.Signals) -> None:
        if stop.done():
            os._exit(128 + number)
        stop.set_result(number.name)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    watch = asyncio.create_task(_follow_parent(config.parent_pid, stop))
    try:
        await controller.start()
        await controller.stop(await stop)
    finally:
        watch.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``gradpilot controller``; return the exit code: 2 for usage, 1 for failure."""
    try:
        config = load(sys.argv[1:] if argv is None else argv)
        POLICIES.get(config.policy)
    except GradpilotError as error:
        sys.stderr.write(f"gradpilot controller: error: {error}\n")
        return 2
    logs.configure(config.log_format, config.log_level)
    keep_the_loop_free()
    try:
        asyncio.run(serve(config))
    except (GradpilotError, OSError) as error:
        logger.critical("cannot start: %s", error)
        return 1
    return 0


async def _follow_parent(pid: int, stop: asyncio.Future[str]) -> None:
    """Ask for a stop when the process ``pid`` is gone; as its child, when we are so no more."""
    if not pid:
        return
    child = os.getppid() == pid
    while child == (os.getppid() == pid) and _alive(pid):
        await asyncio.sleep(PARENT_SECONDS)
    if not stop.done():
        stop.set_result(f"process {pid} is gone")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot resolve http_address {address}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on http_address {address} (port {port}): {error.strerror};"
            f" {_why_not(host)}"
        ) from None
    return listener


def _bind(server: grpc.aio.Server, address: str) -> int:
    host, port = split_address(address)
    said = ""
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        bound, said = 0, f" ({error})"
    if not bound:
        why = f"{_why_not(host)}{said}"
        raise ConfigError(f"cannot listen on grpc_address {address} (port {port}): {why}")
    return bound


def _why_not(host: str) -> str:
    """Return the likely reason why nothing can listen there: no such address, or a port taken."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as trial:
            trial.bind(where)
    except OSError:
        return "this machine has no such address (0.0.0.0 stands for all that it has without IPv6)"
    return "is another controller running?"

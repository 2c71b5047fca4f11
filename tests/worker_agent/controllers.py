"""A fake controller that agents' connections are tested against."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from gradpilot.protos import codec
from gradpilot.protos.messages import (
    Ack,
    AgentMessage,
    Bucket,
    Catalog,
    ControllerMessage,
    Hello,
    Layout,
    Plan,
    Report,
    Welcome,
)
from gradpilot.protos.transport import SERVER_OPTIONS
from gradpilot.protos.v1 import controller_pb2, controller_pb2_grpc
from gradpilot.worker_agent.client import ControllerClient

LAYOUT = Layout.of((Bucket("a", 0, 100), Bucket("b", 1, 50)))
CATALOG = Catalog(LAYOUT, ())
HEALTH = "grpc.health.v1.Health"
Start = Callable[..., ControllerClient]


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Return as soon as the condition holds; fail after so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not happen within {seconds:g} s")
        time.sleep(0.005)


class FakeController(controller_pb2_grpc.ControllerServiceServicer):
    """Serves agents; ``with`` it.

    Args:
        port: Where to listen; 0 for any free port.
        name: Id in its Welcome.
        answers: Whether it says Welcome; if not, it takes what comes and is silent.
        refuses: Status code and text with which it ends every session instead.
        health: Called for every health check; None for no such service.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        name: str = "fake",
        answers: bool = True,
        refuses: tuple[grpc.StatusCode, str] | None = None,
        health: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.answers = answers
        self.refuses = refuses
        self.heard: list[AgentMessage] = []
        self.sessions: list[queue.Queue[ControllerMessage | None]] = []
        self._stopped = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, self._server)
        if health is not None:

            def check(request: bytes, context: grpc.ServicerContext) -> bytes:
                health()
                return b"\x08\x01"  # SERVING

            handlers: dict[str, Any] = {"Check": grpc.unary_unary_rpc_method_handler(check)}
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(HEALTH, handlers),)
            )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> FakeController:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Hang up on everybody and free the port."""
        for session in self.sessions:
            session.put(None)
        self._server.stop(0).wait(5)

    def Session(  # noqa: N802
        self, request_iterator: Iterator[controller_pb2.AgentMessage], context: Any
    ) -> Iterator[controller_pb2.ControllerMessage]:
        if self.refuses is not None:
            context.abort(*self.refuses)
        outbox: queue.Queue[ControllerMessage | None] = queue.Queue()
        threading.Thread(target=self._read, args=(request_iterator, outbox), daemon=True).start()
        self.sessions.append(outbox)
        while (message := outbox.get()) is not None:
            yield codec.encode_controller(message)

    def _read(
        self,
        requests: Iterator[controller_pb2.AgentMessage],
        outbox: queue.Queue[ControllerMessage | None],
    ) -> None:
        try:
            for envelope in requests:
                message = codec.decode_agent(envelope)
                assert message is not None
                self.heard.append(message)
                if isinstance(message, Hello) and self.answers:
                    outbox.put(self.welcome())
        except grpc.RpcError:
            pass  # the agent hung up
        except Exception:
            if self._server is not None:
                raise
        finally:
            outbox.put(None)

    def welcome(self, **changes: Any) -> Welcome:
        """Return its answer to Hello."""
        values: dict[str, Any] = {
            "controller": self.name,
            "term": 1,
            "report_seconds": 2.0,
            "plan_ttl_seconds": 60.0,
        }
        return Welcome(**{**values, **changes})

    def say(self, message: ControllerMessage) -> None:
        """Send to the newest session."""
        self.sessions[-1].put(message)

    def kinds(self) -> list[str]:
        """Return the names of the kinds of messages heard, in order."""
        return [type(m).__name__ for m in list(self.heard)]

    @property
    def hellos(self) -> list[Hello]:
        return [m for m in list(self.heard) if isinstance(m, Hello)]

    @property
    def catalogs(self) -> list[Catalog]:
        return [m for m in list(self.heard) if isinstance(m, Catalog)]

    @property
    def reports(self) -> list[Report]:
        return [m for m in list(self.heard) if isinstance(m, Report)]

    @property
    def acks(self) -> list[Ack]:
        return [m for m in list(self.heard) if isinstance(m, Ack)]


class Rank:
    """What a rank would say in Hello."""

    def __init__(self) -> None:
        self.step = 0
        self.plan: Plan | None = None

    def hello(self) -> Hello:
        return Hello("run", "model", "1", 0, 2, step=self.step, plan=self.plan)


def report(sequence: int) -> Report:
    return Report(LAYOUT.digest, sequence, 0, 1, 1, 1, 0.1, 0.1, 0.0, loss=0.0, lr=0.0)


def plan(id_: int, term: int = 1, **changes: Any) -> Plan:
    return Plan(**{"term": term, "id": id_, "layout": LAYOUT.digest, **changes})

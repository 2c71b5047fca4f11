"""A line between agents and controller on which plans get lost, late, doubled or out of order."""

from __future__ import annotations

import collections
import heapq
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from bench.chaos.schedule import Fault
from gradpilot.protos import codec
from gradpilot.protos.messages import Hello
from gradpilot.protos.transport import CLIENT_OPTIONS, SERVER_OPTIONS
from gradpilot.protos.v1 import controller_pb2, controller_pb2_grpc


class Mail:
    """What is on its way to one rank: messages that come out when they are due."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._messages: list[tuple[float, int, Any]] = []
        self._count = itertools.count()
        self._kept: list[Any] = []
        self._over = False

    def put(self, message: Any, seconds: float = 0.0) -> None:
        """Send a message that arrives so many seconds later."""
        with self._wake:
            due = time.monotonic() + seconds
            heapq.heappush(self._messages, (due, next(self._count), message))
            self._wake.notify_all()

    def keep(self, message: Any) -> None:
        """Hold a message back until ``release``."""
        with self._wake:
            self._kept.append(message)

    def release(self) -> None:
        """Send what was held back."""
        with self._wake:
            kept, self._kept = self._kept, []
        for message in kept:
            self.put(message)

    def end(self) -> None:
        """Hang up; what is still on its way is lost."""
        with self._wake:
            self._over = True
            self._wake.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._wake:
                while not self._over:
                    now = time.monotonic()
                    due = self._messages[0][0] if self._messages else None
                    if due is not None and due <= now:
                        break
                    self._wake.wait(None if due is None else due - now)
                if self._over:
                    return
                message = heapq.heappop(self._messages)[2]
            yield message


class Line(controller_pb2_grpc.ControllerServiceServicer):
    """Passes sessions on to a controller, and does to plans what faults say; ``with`` it.

    Args:
        upstream: Address of the controller; may be set again when another one takes over.

    Attributes:
        address: Where agents connect.
        done: How many faults of each kind have been carried out.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.done: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._faults: dict[tuple[int, int], Fault] = {}
        self._plans: collections.Counter[int] = collections.Counter()
        self._mails: dict[int, Mail] = {}
        self._server = grpc.server(ThreadPoolExecutor(16), options=SERVER_OPTIONS)
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Line:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for mail in list(self._mails.values()):
            mail.end()
        self._server.stop(0).wait(5)

    def begin(self, faults: Sequence[Fault]) -> None:
        """Let these faults happen from the next plan on, instead of those before."""
        with self._lock:
            self._faults = {(fault.rank, fault.nth): fault for fault in faults}
            self._plans.clear()

    def release(self) -> None:
        """Deliver plans that wait for a later one to overtake them."""
        for mail in list(self._mails.values()):
            mail.release()

    def Session(  # noqa: N802
        self, request_iterator: Iterator[controller_pb2.AgentMessage], context: Any
    ) -> Iterator[controller_pb2.ControllerMessage]:
        """Pass one session on."""
        first = next(request_iterator)
        hello = codec.decode_agent(first)
        assert isinstance(hello, Hello)
        mail = self._mails[hello.rank] = Mail()
        options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        with grpc.insecure_channel(self.upstream, options=options) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            call = stub.Session(itertools.chain([first], request_iterator))
            context.add_callback(mail.end)
            failure: list[grpc.RpcError] = []

            def read() -> None:
                try:
                    for envelope in call:
                        self._deliver(hello.rank, envelope, mail)
                except grpc.RpcError as error:
                    failure.append(error)
                finally:
                    mail.end()

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            yield from mail
            call.cancel()
            reader.join(5)
        if failure and isinstance(failure[0], grpc.Call):
            context.abort(failure[0].code(), failure[0].details())

    def _deliver(self, rank: int, envelope: Any, mail: Mail) -> None:
        if envelope.WhichOneof("message") != "plan":
            mail.put(envelope)
            return
        with self._lock:
            fault = self._faults.pop((rank, self._plans[rank]), None)
            self._plans[rank] += 1
            if fault is not None:
                self.done[fault.kind] += 1
        if fault is None:
            mail.put(envelope)
        elif fault.kind == "delay":
            mail.put(envelope, fault.seconds)
        elif fault.kind == "duplicate":
            mail.put(envelope)
            mail.put(envelope, fault.seconds)
        elif fault.kind == "reorder":
            mail.keep(envelope)
            return  # the next plan lets it go
        mail.release()

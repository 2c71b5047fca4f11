"""Asks the controller what it decided, as any operator could."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any

import grpc

from gradpilot.demo.records import Taken
from gradpilot.protos import codec
from gradpilot.protos.jsoncodec import to_json
from gradpilot.protos.messages import Decision, RunDetail, RunRef
from gradpilot.protos.transport import CLIENT_OPTIONS
from gradpilot.protos.v1.operator_pb2_grpc import OperatorServiceStub

CALL_SECONDS = 5.0

WATCH_SECONDS = 0.5
"""Time between two looks of a ``Watcher``."""


class OperatorClient:
    """A connection to the operator's side of a controller; close it after use.

    Args:
        address: ``host:port``.
        run: Run id.
        model: Model name.
    """

    def __init__(self, address: str, run: str, model: str) -> None:
        self._ref = RunRef(run, model)
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        self._stub: Any = OperatorServiceStub(self._channel)

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def detail(self) -> RunDetail:
        """Return the run as it is now.

        Raises:
            grpc.RpcError: The controller does not answer or does not know the run.
        """
        detail: RunDetail = codec.decode(
            self._stub.GetRun(codec.encode(self._ref), timeout=CALL_SECONDS)
        )
        return detail

    def decisions(self) -> Iterator[Taken]:
        """Yield all decisions of the run, oldest first.

        Raises:
            grpc.RpcError: The controller does not answer.
        """
        newest = self.detail().decision
        for number in range(1, newest.id + 1 if newest is not None else 1):
            request = codec.encode(replace(self._ref, decision=number))
            try:
                answer = self._stub.ExplainDecision(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    continue  # the number belongs to a decision that was dropped
                raise
            decision: Decision = codec.decode(answer)
            inputs = json.loads(decision.inputs_json) if decision.inputs_json else {}
            yield Taken(
                to_json(replace(decision, inputs_json="")),
                float(inputs.get("compute_seconds", 0.0)),
            )


class Watcher:
    """Keeps the newest state of a run at hand, from a thread of its own; close it after use.

    Args:
        address: ``host:port`` of the controller.
        run: Run id.
        model: Model name.
    """

    def __init__(self, address: str, run: str, model: str) -> None:
        self.newest: RunDetail | None = None
        self._of = (address, run, model)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="demo-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; ``newest`` stays."""
        self._stop.set()
        self._thread.join(CALL_SECONDS + 1.0)

    def _run(self) -> None:
        with OperatorClient(*self._of) as client:
            while not self._stop.wait(WATCH_SECONDS):
                with contextlib.suppress(grpc.RpcError):  # not there yet, or gone with the run
                    self.newest = client.detail()

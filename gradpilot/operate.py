"""The operator's side of the protocol: a small synchronous client."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, TypeVar

import grpc

from gradpilot.errors import GradpilotError
from gradpilot.protos import codec
from gradpilot.protos.messages import (
    Decision,
    Done,
    Option,
    PinOrder,
    RunDetail,
    RunRef,
    RunSummary,
)
from gradpilot.protos.transport import CLIENT_OPTIONS
from gradpilot.protos.v1.operator_pb2_grpc import OperatorServiceStub

TIMEOUT_SECONDS = 10.0

T = TypeVar("T")


class OperatorError(GradpilotError):
    """The controller cannot be reached or refuses the order."""


class NotThereError(OperatorError):
    """The controller knows no such run, model or decision."""


class OperatorClient:
    """Asks a controller about its runs and gives it orders; use as a context manager.

    Every call has a deadline; every method raises ``OperatorError`` with the controller's own
    words if it refuses.

    Args:
        address: ``host:port`` of the controller.
        timeout_seconds: Deadline of a call.
    """

    def __init__(self, address: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._address = address
        self._timeout = timeout_seconds
        self._channel = grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        self._stub = OperatorServiceStub(self._channel)

    def __enter__(self) -> OperatorClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def healthy(self) -> bool:
        """Return whether the controller serves agents and operators; False while it drains."""
        # The two bytes of the standard answer; its package would tie protobuf to the newest.
        check: Any = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        return bool(self._call(check, b"") == b"\x08\x01")

    def runs(self) -> tuple[RunSummary, ...]:
        """Return all runs that the controller knows."""
        answer = self._call(self._stub.ListRuns, codec.list_runs_request())
        return tuple(codec.decode_runs(answer))

    def run(self, ref: RunRef) -> RunDetail:
        """Return one run."""
        return self._ask(self._stub.GetRun, ref, RunDetail)

    def explain(self, ref: RunRef) -> Decision:
        """Return a decision with its front and inputs."""
        return self._ask(self._stub.ExplainDecision, ref, Decision)

    def watch(self, ref: RunRef) -> Iterator[Decision]:
        """Yield decisions as they are taken, until the controller goes away."""
        try:
            request: Any = codec.encode(ref)
            for message in self._stub.Watch(request):
                decision = codec.decode(message)
                assert isinstance(decision, Decision)
                yield decision
        except grpc.RpcError as error:
            raise self._explained(error) from None

    def pin(self, run: str, model: str, option: Option) -> Done:
        """Give all buckets one option until unpinned."""
        return self._ask(self._stub.Pin, PinOrder(run, model, option), Done)

    def unpin(self, ref: RunRef) -> Done:
        """Let the policy choose again."""
        return self._ask(self._stub.Unpin, ref, Done)

    def freeze(self, ref: RunRef) -> Done:
        """Keep the present plan; no decisions are taken."""
        return self._ask(self._stub.Freeze, ref, Done)

    def resume(self, ref: RunRef) -> Done:
        """Take decisions again."""
        return self._ask(self._stub.Resume, ref, Done)

    def _ask(self, method: Any, request: object, kind: type[T]) -> T:
        answer = codec.decode(self._call(method, codec.encode(request)))
        assert isinstance(answer, kind)
        return answer

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout, wait_for_ready=False)
        except grpc.RpcError as error:
            raise self._explained(error) from None

    def _explained(self, error: grpc.RpcError) -> OperatorError:
        code = error.code() if isinstance(error, grpc.Call) else None
        details = error.details() if isinstance(error, grpc.Call) else repr(error)
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return OperatorError(
                f"no controller answers at {self._address} ({details}); name another one with"
                " --address or GRADPILOT_CONTROLLER"
            )
        kind = NotThereError if code is grpc.StatusCode.NOT_FOUND else OperatorError
        return kind(str(details))

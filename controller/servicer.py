"""The two gRPC services: translate messages, map errors to status codes. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from gradpilot.controller.errors import (
    CapacityError,
    NotFoundError,
    RefusedError,
    ReplacedError,
    StoreError,
)
from gradpilot.controller.operators import Operators
from gradpilot.controller.sessions import AgentSession, Sessions
from gradpilot.errors import (
    ConfigError,
    GradpilotError,
    MessageTooLargeError,
    ProtocolError,
)
from gradpilot.protos import codec
from gradpilot.protos.messages import PROTOCOL_VERSION, Decision, Hello
from gradpilot.protos.v1 import controller_pb2_grpc, operator_pb2_grpc
from gradpilot.protos.validate import validate_hello

logger = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""How long a stream may stay without a hello."""

_CODES: tuple[tuple[type[GradpilotError], grpc.StatusCode], ...] = (
    (ReplacedError, grpc.StatusCode.ABORTED),
    (RefusedError, grpc.StatusCode.FAILED_PRECONDITION),
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (MessageTooLargeError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (StoreError, grpc.StatusCode.UNAVAILABLE),
    (ProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
)

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


def status_code(error: GradpilotError) -> grpc.StatusCode:
    """Return the status code that an error ends a call with."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


class ControllerServicer(controller_pb2_grpc.ControllerServiceServicer):
    """Serves agents.

    Args:
        sessions: Open sessions.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.refused: Counter[str] = Counter()
        """Sessions ended with an error, by the name of the status code."""

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> None:
        """Serve one rank until it leaves, a newer session replaces it, or the controller stops."""
        session: AgentSession | None = None
        reader: asyncio.Task[None] | None = None
        try:
            session = await self._sessions.open(await self._hello(request_iterator))
            reader = asyncio.create_task(self._read(session, request_iterator))
            async for message in session.outbox:
                await context.write(codec.encode_controller(message))
        except GradpilotError as error:
            if reader is not None:  # it must not read from a stream that was aborted
                reader.cancel()
                await asyncio.wait([reader])
            await self._refuse(context, session, error)
        finally:
            if reader is not None:
                reader.cancel()
            if session is not None:
                self._sessions.close(session)

    async def _hello(self, requests: AsyncIterator[Any]) -> Hello:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                first = await anext(requests, None)
        except TimeoutError:
            raise ProtocolError(f"expected Hello within {HELLO_SECONDS:g} s, got nothing") from None
        if first is None:
            raise ProtocolError("expected Hello, the stream ended before it")
        hello = codec.decode_agent(first)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"expected Hello first, got {type(hello).__name__}")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise RefusedError(
                f"this controller speaks protocol version {PROTOCOL_VERSION}, the agent"
                f" {hello.protocol_version} (gradpilot {hello.agent_version!r}); use the same"
                " gradpilot on both sides",
                "session",
            )
        validate_hello(hello)
        return hello

    async def _read(self, session: AgentSession, requests: AsyncIterator[Any]) -> None:
        """Take what the agent says until it stops; ends the session whatever happens."""
        try:
            async for envelope in requests:
                try:
                    message = codec.decode_agent(envelope)
                except ProtocolError as error:
                    self._sessions.malformed(session, error)
                    continue
                if message is not None:  # else of a kind that a newer agent knows
                    self._sessions.take(session, message)
        except GradpilotError as error:
            session.outbox.close(error)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("session failed", extra=session.where)
            session.outbox.close(GradpilotError(f"the controller failed: {error!r}"))
        finally:
            session.outbox.close()

    async def _refuse(
        self, context: Context, session: AgentSession | None, error: GradpilotError
    ) -> None:
        code = status_code(error)
        self.refused[code.name] += 1
        logger.warning(
            "session ended (%s): %s",
            code.name,
            error,
            extra=session.where if session is not None else {"peer": context.peer()},
        )
        await context.abort(code, str(error))


class OperatorServicer(operator_pb2_grpc.OperatorServiceServicer):
    """Serves operators.

    Args:
        operators: Who answers.
    """

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    async def ListRuns(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return all runs."""
        return codec.encode_runs(await _mapped(context, self._operators.list()))

    async def GetRun(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return one run; its decision without inputs."""
        detail = await _mapped(context, self._operators.detail(codec.decode(request)))
        if detail.decision is not None:
            detail = replace(detail, decision=replace(detail.decision, inputs_json=""))
        return codec.encode(detail)

    async def ExplainDecision(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return one decision with its front and, if it fits a message, its inputs."""
        decision = await _mapped(context, self._operators.explain(codec.decode(request)))
        return _encode_decision(decision)

    async def Watch(  # type: ignore[override]  # noqa: N802
        self, request: Any, context: Context
    ) -> None:
        """Send decisions, without inputs, as they are taken."""
        try:
            async with self._operators.watching(codec.decode(request)) as decisions:
                await context.send_initial_metadata(())  # so that the caller knows it watches
                async for decision in decisions:
                    await context.write(_encode_decision(replace(decision, inputs_json="")))
        except GradpilotError as error:
            await context.abort(status_code(error), str(error))

    async def Pin(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Give all buckets one option."""
        return await self._order(context, self._operators.pin, request)

    async def Unpin(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Let the policy choose again."""
        return await self._order(context, self._operators.unpin, request)

    async def Freeze(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Keep the present plan."""
        return await self._order(context, self._operators.freeze, request)

    async def Resume(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Take decisions again."""
        return await self._order(context, self._operators.resume, request)

    async def _order(self, context: Context, call: Any, request: Any) -> Any:
        async def work() -> Any:
            return await call(codec.decode(request))

        done = await _mapped(context, work())
        logger.info("operator: %s", done.detail, extra={"run": request.run, "model": request.model})
        return codec.encode(done)


async def _mapped(context: Context, answer: Awaitable[T]) -> T:
    try:
        return await answer
    except GradpilotError as error:
        await context.abort(status_code(error), str(error))
        raise  # abort always raises; this tells the type checker


def _encode_decision(decision: Decision) -> Any:
    """Leave out what explains least until the decision fits one message."""
    for smaller in (decision, replace(decision, inputs_json="")):
        try:
            return codec.encode(smaller)
        except MessageTooLargeError:
            continue
    return codec.encode(replace(decision, inputs_json="", front=()))

"""Turns the dataclasses of ``messages`` into protobuf messages of the same name, and back.

The only importer of the generated message classes; beside it, only the gRPC server and clients
import the generated stubs. Nothing here knows a message by name except the two session envelopes
and the list of runs: classes, fields and types are read from the dataclasses.

What does not come over the wire: fields of a newer peer that this version does not know are
ignored; fields that an older peer does not send take the dataclass's default. What was decoded is
well formed, not yet plausible: ``validate`` judges the values.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from gradpilot.errors import MessageTooLargeError, ProtocolError
from gradpilot.protos import messages
from gradpilot.protos.messages import (
    MAX_MESSAGE_BYTES,
    AgentMessage,
    ControllerMessage,
    Plan,
    RunSummary,
)
from gradpilot.protos.reflection import shapes
from gradpilot.protos.v1 import controller_pb2, operator_pb2, types_pb2

M = TypeVar("M", bound=Message)

PB2_MODULES = (types_pb2, controller_pb2, operator_pb2)
"""Generated modules of this version of the protocol."""


def encode(obj: Any) -> Message:
    """Return the protobuf message of a dataclass instance.

    Raises:
        ProtocolError: A value does not fit its field, such as an integer beyond 64 bits.
        MessageTooLargeError: The message exceeds ``MAX_MESSAGE_BYTES``.
    """
    return _capped(_encode(obj))


def decode(message: Message) -> Any:
    """Return the dataclass instance of a protobuf message.

    Raises:
        ProtocolError: No dataclass has the message's name, or a required field is absent.
        MessageTooLargeError: The message exceeds ``MAX_MESSAGE_BYTES``.
    """
    name = message.DESCRIPTOR.name
    cls = getattr(messages, name, None)
    if not isinstance(cls, type):
        raise ProtocolError(f"expected a message with a dataclass of its name, got {name!r}")
    return _decode(_capped(message), cls)


# --- the session -------------------------------------------------------------------------------


def encode_agent(message: AgentMessage) -> controller_pb2.AgentMessage:
    """Return the envelope of what an agent says; raises as ``encode`` does."""
    return _wrap(controller_pb2.AgentMessage, message)


def decode_agent(envelope: controller_pb2.AgentMessage) -> AgentMessage | None:
    """Return what an agent said; None if it is of a kind that this version does not know.

    A newer agent may say such things, so the caller skips None. An empty envelope looks the same.
    Raises as ``decode`` does.
    """
    return cast("AgentMessage | None", _unwrap(envelope))


def encode_controller(message: ControllerMessage) -> controller_pb2.ControllerMessage:
    """Return the envelope of what the controller says; raises as ``encode`` does."""
    return _wrap(controller_pb2.ControllerMessage, message)


def decode_controller(envelope: controller_pb2.ControllerMessage) -> ControllerMessage | None:
    """Return what the controller said; None and errors as in ``decode_agent``."""
    return cast("ControllerMessage | None", _unwrap(envelope))


# --- the list of runs, which has no dataclass --------------------------------------------------


def list_runs_request() -> operator_pb2.ListRunsRequest:
    """Return the request of ``OperatorService.ListRuns``."""
    return operator_pb2.ListRunsRequest()


def encode_runs(runs: Iterable[RunSummary]) -> operator_pb2.ListRunsResponse:
    """Return the answer of ``OperatorService.ListRuns``; raises as ``encode`` does."""
    response = operator_pb2.ListRunsResponse()
    response.runs.extend(cast(operator_pb2.RunSummary, _encode(run)) for run in runs)
    return _capped(response)


def decode_runs(response: operator_pb2.ListRunsResponse) -> tuple[RunSummary, ...]:
    """Return the runs in an answer of ``OperatorService.ListRuns``; raises as ``decode`` does."""
    return tuple(_decode(run, RunSummary) for run in _capped(response).runs)


# --- plans as bytes, for the agreement among ranks ---------------------------------------------


def dumps(plan: Plan) -> bytes:
    """Return a plan as bytes; equal plans give equal bytes. Raises as ``encode`` does."""
    return encode(plan).SerializeToString(deterministic=True)


def loads(data: bytes) -> Plan:
    """Return the plan that ``dumps`` wrote.

    Raises:
        ProtocolError: The bytes are no plan. Not every wrong byte can be told from a right one;
            ``validate.validate_plan`` compares the layout.
        MessageTooLargeError: There are more than ``MAX_MESSAGE_BYTES``.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise _too_large("Plan", len(data))
    message = types_pb2.Plan()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ProtocolError(f"expected a serialised plan, got {len(data)} bytes: {error}") from None
    return cast(Plan, _decode(message, Plan))


# --- reflection --------------------------------------------------------------------------------


@cache
def _message_class(name: str) -> type[Message]:
    for module in PB2_MODULES:
        if name in module.DESCRIPTOR.message_types_by_name:
            return cast(type[Message], getattr(module, name))
    raise ProtocolError(f"expected a dataclass of gradpilot.protos.messages, got {name!r}")


def _encode(obj: Any) -> Message:
    cls: type = type(obj)
    values: dict[str, Any] = {}
    for shape in shapes(cls):
        value = getattr(obj, shape.name)
        if value is None:
            if shape.optional:
                continue
            raise ProtocolError(f"{cls.__name__}.{shape.name}: expected a value, got None")
        if shape.nested:
            value = [_encode(item) for item in value] if shape.many else _encode(value)
        values[shape.name] = value
    try:
        return _message_class(cls.__name__)(**values)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{cls.__name__} has a value that does not fit: {error}") from None


@cache
def _layout(cls: type) -> tuple[tuple[str, type | None, bool, bool, bool], ...]:
    """Return (name, nested class or None, many, has presence, must be present) of each field."""
    fields = _message_class(cls.__name__).DESCRIPTOR.fields_by_name
    return tuple(
        (
            shape.name,
            shape.item if shape.nested else None,
            shape.many,
            fields[shape.name].has_presence,
            shape.required and not shape.optional,
        )
        for shape in shapes(cls)
    )


def _decode(message: Message, cls: type) -> Any:
    values: dict[str, Any] = {}
    for name, nested, many, presence, needed in _layout(cls):
        if presence and not message.HasField(name):
            if needed:
                raise ProtocolError(f"{cls.__name__}.{name}: expected a value, got none")
            continue
        value = getattr(message, name)
        if many:
            value = tuple([_decode(item, nested) for item in value] if nested else value)
        elif nested:
            value = _decode(value, nested)
        values[name] = value
    return cls(**values)


def _wrap(envelope: type[M], message: Any) -> M:
    name = type(message).__name__
    for field in envelope.DESCRIPTOR.oneofs[0].fields:
        if field.message_type is not None and field.message_type.name == name:
            return _capped(envelope(**{field.name: _encode(message)}))
    raise ProtocolError(f"{envelope.DESCRIPTOR.name} cannot carry {name}")


def _unwrap(envelope: Message) -> Any:
    case = envelope.WhichOneof("message")
    return None if case is None else decode(getattr(envelope, case))


def _capped(message: M) -> M:
    size = message.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise _too_large(message.DESCRIPTOR.name, size)
    return message


def _too_large(name: str, size: int) -> MessageTooLargeError:
    return MessageTooLargeError(
        f"{name} has {size} bytes, more than the {MAX_MESSAGE_BYTES} that one message may have;"
        " send less in it: fewer samples in a report, fewer ratios per family in a catalog,"
        " or fewer buckets (a larger bucket_cap_mb of DDP)"
    )

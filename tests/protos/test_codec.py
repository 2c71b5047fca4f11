"""Every message survives the wire, and dataclasses and .proto files say the same."""

import contextlib
import dataclasses
import math
from typing import Any, get_args

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.errors import MessageTooLargeError, ProtocolError
from gradpilot.protos import codec, messages
from gradpilot.protos.messages import (
    DENSE,
    MAX_MESSAGE_BYTES,
    Ack,
    Assignment,
    Decision,
    Done,
    Hello,
    Option,
    PinOrder,
    Plan,
    Report,
    RunRef,
    RunSummary,
    Setting,
    Welcome,
)
from gradpilot.protos.reflection import shapes
from gradpilot.protos.v1 import controller_pb2, operator_pb2, types_pb2
from tests.protos.strategies import CLASSES, instances, same

DESCRIPTORS = {
    name: descriptor
    for module in codec.PB2_MODULES
    for name, descriptor in module.DESCRIPTOR.message_types_by_name.items()
}
ENVELOPES = {"AgentMessage", "ControllerMessage", "ListRunsRequest", "ListRunsResponse"}
"""Messages without a dataclass."""

TYPES = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_DOUBLE: float,  # never float32: values must come back bit for bit
    FieldDescriptor.TYPE_INT32: int,
    FieldDescriptor.TYPE_SINT32: int,
    FieldDescriptor.TYPE_INT64: int,
    FieldDescriptor.TYPE_SINT64: int,
}


# --- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_round_trip_of_every_class(cls: type, data: st.DataObject) -> None:
    value = data.draw(instances(cls))
    message = codec.encode(value)
    assert message.DESCRIPTOR.name == cls.__name__
    parsed = type(message).FromString(message.SerializeToString())
    assert same(codec.decode(parsed), value)


@pytest.mark.parametrize("cls", get_args(messages.AgentMessage), ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_round_trip_of_agent_messages(cls: type, data: st.DataObject) -> None:
    value = data.draw(instances(cls))
    envelope = controller_pb2.AgentMessage.FromString(codec.encode_agent(value).SerializeToString())
    assert same(codec.decode_agent(envelope), value)


@pytest.mark.parametrize("cls", get_args(messages.ControllerMessage), ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_round_trip_of_controller_messages(cls: type, data: st.DataObject) -> None:
    value = data.draw(instances(cls))
    sent = codec.encode_controller(value).SerializeToString()
    envelope = controller_pb2.ControllerMessage.FromString(sent)
    assert same(codec.decode_controller(envelope), value)


@given(runs=st.lists(instances(RunSummary), max_size=3).map(tuple))
@settings(deadline=None)
def test_round_trip_of_the_list_of_runs(runs: tuple[RunSummary, ...]) -> None:
    response = operator_pb2.ListRunsResponse.FromString(codec.encode_runs(runs).SerializeToString())
    assert same(codec.decode_runs(response), runs)


@given(plan=instances(Plan))
@settings(deadline=None)
def test_plan_bytes_are_deterministic_and_round_trip(plan: Plan) -> None:
    data = codec.dumps(plan)
    assert same(codec.loads(data), plan)
    assert codec.dumps(codec.loads(data)) == data


def test_plan_bytes_stay_what_they_were() -> None:
    # Ranks may run different protobuf releases, and old bytes must stay readable.
    option = Option("topk", 0.25, "allgather", settings=(Setting("k", "v"),))
    plan = Plan(3, 7, "0123", (Assignment("b", option),), interval=20, policy="p", reason="r")
    assert codec.dumps(plan).hex() == PLAN_HEX
    assert codec.loads(bytes.fromhex(PLAN_HEX_BEFORE_SHRINK)) == plan


PLAN_HEX_BEFORE_SHRINK = (
    "080310071a043031323322350a016212300a04746f706b11000000000000d03f1a09616c6c676174"
    "6865722a0672616e646f6d3204736b697042060a016b1201762a250a046e6f6e6511000000000000"
    "f03f1a066e61746976652a0672616e646f6d3204736b697030143a0170420172"
)

PLAN_HEX = (
    "080310071a0430313233223e0a016212390a04746f706b11000000000000d03f1a09616c6c67"
    "61746865722a0672616e646f6d3204736b697042060a016b12017649000000000000f03f2a2e"
    "0a046e6f6e6511000000000000f03f1a066e61746976652a0672616e646f6d3204736b697049"
    "000000000000f03f30143a0170420172"
)


# --- dataclasses and descriptors ---------------------------------------------------------------


def test_every_message_has_a_dataclass_and_the_reverse() -> None:
    assert {cls.__name__ for cls in CLASSES} == set(DESCRIPTORS) - ENVELOPES


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_fields_agree_in_name_type_and_presence(cls: type) -> None:
    fields = DESCRIPTORS[cls.__name__].fields_by_name
    assert set(fields) == {shape.name for shape in shapes(cls)}
    for shape in shapes(cls):
        field = fields[shape.name]
        if shape.nested:
            assert field.message_type.name == shape.item.__name__
        else:
            assert TYPES[field.type] is shape.item
        assert field.is_repeated == shape.many


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_absent_fields_mean_the_default_of_the_dataclass(cls: type) -> None:
    fields = DESCRIPTORS[cls.__name__].fields_by_name
    for field in dataclasses.fields(cls):
        if (cls, field.name) == (Hello, "protocol_version"):
            continue  # see the next test
        zero = () if fields[field.name].is_repeated else fields[field.name].default_value
        if field.default not in (dataclasses.MISSING, zero):
            assert fields[field.name].has_presence, f"make {cls.__name__}.{field.name} optional"


def test_a_peer_that_does_not_name_its_version_is_not_taken_for_ours() -> None:
    assert codec.decode(types_pb2.Hello(run="r")).protocol_version == 0


def test_hand_written_requests_take_the_defaults() -> None:
    ref = operator_pb2.RunRef(run="r")
    assert codec.decode(ref) == RunRef("r", "", -1)
    order = operator_pb2.PinOrder(run="r", option=types_pb2.Option(compressor="bf16"))
    assert codec.decode(order) == PinOrder("r", "", Option("bf16"))
    assert codec.decode(types_pb2.Plan()) == Plan(0, 0, "", default=DENSE, interval=50)
    report = codec.decode(controller_pb2.Report())
    assert math.isnan(report.loss)
    assert math.isnan(report.lr)


def test_session_cases_are_exactly_the_unions() -> None:
    for name in ("AgentMessage", "ControllerMessage"):
        (oneof,) = DESCRIPTORS[name].oneofs
        cases = {field.message_type.name for field in oneof.fields}
        assert cases == {cls.__name__ for cls in get_args(getattr(messages, name))}


def test_services_have_the_agreed_calls() -> None:
    session = controller_pb2.DESCRIPTOR.services_by_name["ControllerService"].methods_by_name
    assert set(session) == {"Session"}
    calls = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].methods_by_name
    assert {name: (m.input_type.name, m.output_type.name) for name, m in calls.items()} == {
        "ListRuns": ("ListRunsRequest", "ListRunsResponse"),
        "GetRun": ("RunRef", "RunDetail"),
        "ExplainDecision": ("RunRef", "Decision"),
        "Watch": ("RunRef", "Decision"),
        "Pin": ("PinOrder", "Done"),
        "Unpin": ("RunRef", "Done"),
        "Freeze": ("RunRef", "Done"),
        "Resume": ("RunRef", "Done"),
    }


# --- peers of another version, and malformed messages ------------------------------------------

UNKNOWN_FIELD = b"\xfa\x3f\x03abc"
"""Field 1023 with three bytes."""


def test_unknown_fields_are_ignored() -> None:
    ack = Ack(1, 2, "held", 3)
    data = codec.encode(ack).SerializeToString() + UNKNOWN_FIELD
    assert codec.decode(controller_pb2.Ack.FromString(data)) == ack
    assert codec.loads(codec.dumps(Plan(1, 1, "x")) + UNKNOWN_FIELD) == Plan(1, 1, "x")


def test_unknown_cases_decode_to_none() -> None:
    assert codec.decode_agent(controller_pb2.AgentMessage.FromString(UNKNOWN_FIELD)) is None
    newer = controller_pb2.ControllerMessage.FromString(UNKNOWN_FIELD)
    assert codec.decode_controller(newer) is None


def test_absent_required_message_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"PinOrder\.option: expected a value, got none"):
        codec.decode(operator_pb2.PinOrder(run="r"))
    with pytest.raises(ProtocolError, match=r"Assignment\.option"):
        codec.decode(types_pb2.Plan(assignments=[types_pb2.Assignment(bucket="b")]))


def test_messages_without_a_dataclass_are_refused() -> None:
    with pytest.raises(ProtocolError, match="ListRunsRequest"):
        codec.decode(codec.list_runs_request())


def test_envelopes_refuse_what_the_other_side_says() -> None:
    wrong: Any = Welcome("c", 1, 1.0, 1.0)
    with pytest.raises(ProtocolError, match="AgentMessage cannot carry Welcome"):
        codec.encode_agent(wrong)


@pytest.mark.parametrize(
    "plan",
    [Plan(2**63, 1, ""), Plan(1, 1, "\ud800"), Plan("1", 1, ""), Plan(None, 1, "")],  # type: ignore[arg-type]
)
def test_values_that_do_not_fit_are_refused(plan: Plan) -> None:
    with pytest.raises(ProtocolError, match="Plan"):
        codec.encode(plan)


@given(data=st.binary(max_size=60))
@settings(deadline=None)
def test_arbitrary_bytes_are_a_plan_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(codec.loads(data), Plan)


def test_truncated_plan_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="expected a serialised plan, got 5 bytes"):
        codec.loads(codec.dumps(Plan(1, 1, "0123456789"))[:5])


# --- size --------------------------------------------------------------------------------------


def test_size_cap_holds_in_both_directions() -> None:
    fits = Done("x" * (MAX_MESSAGE_BYTES - 4))  # one byte of tag, three of length
    assert codec.encode(fits).ByteSize() == MAX_MESSAGE_BYTES
    with pytest.raises(MessageTooLargeError, match=f"{MAX_MESSAGE_BYTES + 1} bytes"):
        codec.encode(Done("x" * (MAX_MESSAGE_BYTES - 3)))
    with pytest.raises(MessageTooLargeError, match="send less"):
        codec.decode(operator_pb2.Done(detail="x" * MAX_MESSAGE_BYTES))


def test_size_cap_holds_for_sessions_lists_and_plans() -> None:
    text = "x" * MAX_MESSAGE_BYTES
    with pytest.raises(MessageTooLargeError):
        codec.encode_agent(Ack(1, 1, "held", 1, text))
    with pytest.raises(MessageTooLargeError):
        codec.decode_agent(controller_pb2.AgentMessage(ack=controller_pb2.Ack(reason=text)))
    half = RunSummary("r", "m", text[: MAX_MESSAGE_BYTES // 2], 1, 1, 0, 0, "", 0.0, False, "", 0.0)
    with pytest.raises(MessageTooLargeError):
        codec.encode_runs([half, half])
    with pytest.raises(MessageTooLargeError):
        codec.dumps(Plan(1, 1, text))
    with pytest.raises(MessageTooLargeError):
        codec.loads(text.encode() + b"x")


def test_a_full_report_is_far_below_the_cap() -> None:
    sample = messages.WireSample(2**40, 99, 3, "all_reduce", 2**40, 7, 0.1)
    bucket = messages.BucketReport(99, 0.1, 0.1, 0.1, 0.1, 2**40, energy=(0.5,) * 13)
    report = Report("0" * 16, 1, 1, 2**40, 1, 1, 0.1, 0.1, 0.1, (sample,) * 1000, (bucket,) * 1000)
    assert codec.encode(report).ByteSize() < MAX_MESSAGE_BYTES // 5


def test_big_integers_have_64_bits() -> None:
    decision = Decision("r", "m", 2**40, 2**41, 2**42, 0.0, "p", "keep", "")
    assert codec.decode(codec.encode(decision)) == decision

"""JSON text gives back exactly what was written, or says which field is wrong."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.errors import ProtocolError
from gradpilot.policies.base import Inputs, Outcome, PolicySettings
from gradpilot.protos.jsoncodec import from_json, to_json
from gradpilot.protos.messages import (
    Ack,
    Candidate,
    Counters,
    Option,
    Plan,
    Report,
    RunRef,
    Setting,
    Welcome,
)
from gradpilot.protos.reflection import shapes
from tests.protos.strategies import CLASSES, instances, same


@pytest.mark.parametrize("cls", [*CLASSES, Inputs, Outcome], ids=lambda cls: cls.__name__)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_round_trip_of_every_class(cls: type, data: st.DataObject) -> None:
    value = data.draw(instances(cls))
    text = to_json(value)
    again: object = from_json(cls, text)
    assert same(again, value)
    assert to_json(again) == text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1e22])
def test_every_float_survives(value: float) -> None:
    again = from_json(Welcome, to_json(Welcome("c", 1, value, 1.0)))
    assert same(again.report_seconds, value)


def test_text_is_strict_one_line_ascii_json() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    text = to_json(Welcome("zürich\n\ud800", 1, math.nan, -math.inf))
    parsed = json.loads(text, parse_constant=refuse)
    assert parsed["report_seconds"] == "NaN"
    assert parsed["plan_ttl_seconds"] == "-Infinity"
    assert text.isascii()
    assert "\n" not in text
    assert from_json(Welcome, text).controller == "zürich\n\ud800"


def test_unknown_keys_are_ignored_and_missing_ones_take_defaults() -> None:
    assert from_json(RunRef, '{"run":"r","later":[1]}') == RunRef("r", "", -1)
    assert from_json(PolicySettings, "{}") == PolicySettings()  # a default factory and a tuple
    assert from_json(Option, '{"ratio":1}') == Option()
    assert from_json(Plan, '{"term":1,"id":2,"layout":"x"}').default == Option()


def test_whole_numbers_are_floats_where_floats_belong() -> None:
    assert same(from_json(Option, '{"ratio":1}').ratio, 1.0)


@pytest.mark.parametrize(
    ("cls", "text", "message"),
    [
        (Ack, "{", "Ack: expected JSON text"),
        (Ack, "[]", "Ack: expected an object, got []"),
        (RunRef, "{}", "RunRef.run: expected a value, got none"),
        (RunRef, '{"run":null}', "RunRef.run: expected a value of type str, got None"),
        (RunRef, '{"run":"r","decision":1.5}', "RunRef.decision: expected a value of type int"),
        (RunRef, '{"run":"r","decision":true}', "RunRef.decision: expected a value of type int"),
        (Option, '{"ratio":"much"}', "Option.ratio: expected a value of type float, got 'much'"),
        (Option, '{"ratio":NaN}', "Option.ratio: expected a value of type float, got nan"),
        (Option, f'{{"ratio":1{"0" * 400}}}', "Option.ratio: expected a value of type float"),
        (Option, '{"skip_feedback":1}', "Option.skip_feedback: expected a value of type bool"),
        (Option, '{"settings":"x"}', "Option.settings: expected a list, got 'x'"),
        (
            Option,
            '{"settings":[{"name":"a","value":"b"},{"name":1,"value":"b"}]}',
            "Option.settings[1].name: expected a value of type str, got 1",
        ),
        (PolicySettings, '{"weights":[1,2]}', "PolicySettings.weights: expected 3 items"),
    ],
)
def test_wrong_text_names_the_field(cls: type, text: str, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        from_json(cls, text)
    assert message in str(caught.value)


def test_numpy_floats_are_written_as_numbers_and_other_arrays_are_refused() -> None:
    candidate = Candidate((), 0.5, 0.0, 0.0, 1.0, 1.0, 0.1, 1.0)
    value = dataclasses.replace(candidate, gain=np.float64(0.1))
    assert from_json(Candidate, to_json(value)).gain == 0.1
    with pytest.raises(TypeError, match="int64"):
        to_json(Counters(steps=np.int64(3)))  # type: ignore[arg-type]


def test_fields_that_no_codec_can_carry_are_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Odd:
        table: dict[str, int]

    with pytest.raises(TypeError, match=r"Odd\.table: the codecs cannot carry"):
        shapes(Odd)


def test_the_json_codec_loads_no_protobuf() -> None:
    code = (
        "import sys, gradpilot.protos.jsoncodec, gradpilot.protos.validate;"
        "sys.exit(any(m.startswith('google.protobuf') or m == 'grpc' for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_report_text_keeps_nan_losses() -> None:
    report = Report("x", 0, 0, 1, 0, 0, 0.1, 0.1, 0.0)
    assert math.isnan(from_json(Report, to_json(report)).loss)
    assert from_json(Setting, to_json(Setting("a", "b"))) == Setting("a", "b")

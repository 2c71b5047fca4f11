"""What cannot be true is refused with the field's name; what can be true passes."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gradpilot.errors import ProtocolError
from gradpilot.protos import validate
from gradpilot.protos.messages import (
    BF16,
    ENERGY_RATIOS,
    Ack,
    Assignment,
    Bucket,
    BucketReport,
    BucketRounds,
    Catalog,
    ComputeSample,
    Counters,
    Family,
    GoingAway,
    Hello,
    LadderPoint,
    Layout,
    Option,
    PinOrder,
    Plan,
    ProbeRequest,
    Report,
    RunRef,
    Setting,
    Welcome,
    WireRound,
    WireSample,
)

WORLD = 4
LAYOUT = Layout.of((Bucket("a", 0, 1000, parameters=3), Bucket("b", 1, 10)))
ROUNDS = (BucketRounds((WireRound("all_gather", 80),)), BucketRounds(()))
FAMILY = Family(
    "topk",
    (Setting("a", "1"), Setting("b", "2")),
    ("native", "allgather"),
    (LadderPoint(0.01, ROUNDS), LadderPoint(1.0, ROUNDS)),
    gain_model="energy",
)
CATALOG = Catalog(LAYOUT, (FAMILY,), (ComputeSample("topk", (), 0.01, 1000, 0.1, 0.0),))
PLAN = Plan(1, 2, LAYOUT.digest, (Assignment("a", Option("topk", 0.01, "allgather")),), BF16)
HELLO = Hello("run", "model", "1", 3, WORLD, plan=PLAN)
BUCKET = BucketReport(
    0, 0.0, 0.1, 0.1, 0.2, 80, 0.5, 1.0, 0.0, tuple(math.sqrt(r) for r in ENERGY_RATIOS)
)
SAMPLE = WireSample(5, -1, 0, "ring", 80, WORLD - 1, 0.1)
REPORT = Report(
    LAYOUT.digest, 0, 1, 5, 0, 0, 0.1, 0.1, 0.0, (SAMPLE,), (BUCKET, replace(BUCKET, bucket=1))
)
ACK = Ack(1, 2, "agreed", 10)
WELCOME = Welcome("c", 1, 2.0, 60.0)
PROBE = ProbeRequest(1, 1000, 1000000)
AWAY = GoingAway("", 0.0)
REF = RunRef("run")
PIN = PinOrder("run", "", Option("topk", 0.1))


def check(message: Any) -> None:
    """Call the check of a message as its receiver does."""
    checks: dict[type, Callable[[], None]] = {
        Hello: lambda: validate.validate_hello(message),
        Catalog: lambda: validate.validate_catalog(message),
        Report: lambda: validate.validate_report(message, LAYOUT, WORLD),
        Ack: lambda: validate.validate_ack(message),
        Welcome: lambda: validate.validate_welcome(message),
        Plan: lambda: validate.validate_plan(message, LAYOUT, WORLD),
        ProbeRequest: lambda: validate.validate_probe_request(message),
        GoingAway: lambda: validate.validate_going_away(message),
        RunRef: lambda: validate.validate_ref(message),
        PinOrder: lambda: validate.validate_pin(message, WORLD),
    }
    checks[type(message)]()


def at(message: Any, path: str, value: object) -> Any:
    """Return ``message`` with the field at ``path`` replaced: ``samples.0.seconds``."""
    head, _, rest = path.partition(".")
    if isinstance(message, tuple):
        i = int(head)
        inner = at(message[i], rest, value) if rest else value
        return (*message[:i], inner, *message[i + 1 :])
    inner = at(getattr(message, head), rest, value) if rest else value
    return dataclasses.replace(message, **{head: inner})


def named(message: Any, path: str) -> str:
    """Return the path as errors spell it: ``Report.samples[0].seconds``."""
    parts = (f"[{p}]" if p.isdigit() else f".{p}" for p in path.split("."))
    return type(message).__name__ + "".join(parts)


@pytest.mark.parametrize(
    "message",
    [HELLO, CATALOG, REPORT, ACK, WELCOME, PLAN, PROBE, AWAY, REF, PIN],
    ids=lambda message: type(message).__name__,
)
def test_plausible_messages_pass(message: Any) -> None:
    check(message)


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (HELLO, "plan", None),
        (HELLO, "node", "a" * 256),
        (HELLO, "run", "zürich/3"),
        (CATALOG, "calibration", ()),
        (CATALOG, "families", ()),
        (REPORT, "loss", math.nan),
        (REPORT, "loss", -math.inf),
        (REPORT, "lr", math.nan),
        (REPORT, "samples", ()),
        (REPORT, "first_step", 5),
        (REPORT, "buckets.0.energy", ()),
        (REPORT, "buckets.0.energy", (1.0,) * len(ENERGY_RATIOS)),
        (REPORT, "buckets.1.gain", -1.0),
        (REPORT, "buckets.1.gain", 1.0005),
        (REPORT, "buckets.1.gain", 0.0),
        (REPORT, "buckets.1.gradient_sq", 1e30),
        (PLAN, "assignments", ()),
    ],
)
def test_edges_of_the_plausible_pass(message: Any, path: str, value: object) -> None:
    check(at(message, path, value))


MEASUREMENTS = [
    (REPORT, "step_seconds"),
    (REPORT, "compute_seconds"),
    (REPORT, "exposed_seconds"),
    (REPORT, "samples.0.seconds"),
    (REPORT, "buckets.1.ready_seconds"),
    (REPORT, "buckets.1.compress_seconds"),
    (REPORT, "buckets.1.decompress_seconds"),
    (REPORT, "buckets.1.wire_seconds"),
    (CATALOG, "calibration.0.compress_seconds"),
    (CATALOG, "calibration.0.decompress_seconds"),
    (WELCOME, "report_seconds"),
    (WELCOME, "plan_ttl_seconds"),
    (AWAY, "reconnect_seconds"),
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e-9, 1e9])
@pytest.mark.parametrize(("message", "path"), MEASUREMENTS)
def test_durations_must_be_finite_and_believable(message: Any, path: str, value: float) -> None:
    with pytest.raises(ProtocolError) as caught:
        check(at(message, path, value))
    text = str(caught.value)
    assert text.startswith(named(message, path) + ": expected a finite number >= 0")
    assert text.endswith(f"got {value!r}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5, 1.01])
@pytest.mark.parametrize("path", ["buckets.0.gain", "buckets.0.energy.12"])
def test_shares_must_lie_between_0_and_1(path: str, value: float) -> None:
    with pytest.raises(ProtocolError) as caught:
        check(at(REPORT, path, value))
    assert str(caught.value).startswith(named(REPORT, path))


@pytest.mark.parametrize("value", [math.nan, math.inf, -2.0])
@pytest.mark.parametrize("path", ["buckets.0.gradient_sq", "buckets.0.residual_sq"])
def test_norms_must_be_finite(path: str, value: float) -> None:
    with pytest.raises(ProtocolError) as caught:
        check(at(REPORT, path, value))
    assert str(caught.value).startswith(named(REPORT, path))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -0.1, 1.0001])
@pytest.mark.parametrize(
    ("message", "path"),
    [
        (CATALOG, "families.0.ladder.0.ratio"),
        (CATALOG, "calibration.0.ratio"),
        (PLAN, "assignments.0.option.ratio"),
        (PLAN, "default.ratio"),
        (PIN, "option.ratio"),
        (HELLO, "plan.default.ratio"),
    ],
)
def test_ratios_lie_in_0_to_1(message: Any, path: str, value: float) -> None:
    with pytest.raises(ProtocolError) as caught:
        check(at(message, path, value))
    assert str(caught.value).startswith(named(message, path.removesuffix(".ratio")))
    assert "(0, 1]" in str(caught.value)


MOVED = Layout.of((Bucket("a", 1, 1000), Bucket("b", 0, 10)))
TWICE = Layout.of((Bucket("a", 0, 1000), Bucket("a", 1, 10)))


@pytest.mark.parametrize(
    ("message", "path", "value", "error"),
    [
        (HELLO, "protocol_version", 0, "Hello.protocol_version: expected 1"),
        (HELLO, "protocol_version", 2, "got 2"),
        (HELLO, "run", "", "Hello.run: expected printable non-empty text"),
        (HELLO, "run", "a\nb", "Hello.run: expected printable"),
        (HELLO, "model", "", "Hello.model"),
        (HELLO, "incarnation", "", "Hello.incarnation"),
        (HELLO, "node", "a" * 257, "Hello.node: expected printable text of at most 256"),
        (HELLO, "rank", WORLD, "Hello.rank: expected a whole number 0 .. 3, got 4"),
        (HELLO, "rank", -1, "Hello.rank"),
        (HELLO, "local_rank", WORLD, "Hello.local_rank"),
        (HELLO, "world_size", 0, "Hello.world_size"),
        (HELLO, "world_size", 1 << 30, "Hello.world_size"),
        (HELLO, "step", -1, "Hello.step"),
        (HELLO, "plan.interval", 0, "Hello.plan.interval: expected a whole number >= 1, got 0"),
        (CATALOG, "layout.digest", "0" * 16, "Catalog.layout.digest: expected"),
        (CATALOG, "layout.buckets", (), "Catalog.layout.buckets"),
        (CATALOG, "layout.buckets.0.elements", 0, "Catalog.layout.buckets[0].elements"),
        (CATALOG, "layout.buckets.1.elements", 11, "Catalog.layout.digest"),
        (CATALOG, "layout.buckets.1.parameters", 11, "Catalog.layout.buckets[1].parameters"),
        (CATALOG, "layout.buckets.1.dtype", "", "Catalog.layout.buckets[1].dtype"),
        (CATALOG, "layout.buckets.1.fingerprint", "", "Catalog.layout.buckets[1].fingerprint"),
        (CATALOG, "layout", MOVED, "Catalog.layout.buckets[0].index: expected a whole number 0"),
        (CATALOG, "layout", TWICE, "Catalog.layout.buckets[1]: expected an entry that did not"),
        (CATALOG, "families.0.compressor", "", "Catalog.families[0].compressor"),
        (CATALOG, "families.0.settings", FAMILY.settings[::-1], "Catalog.families[0].settings"),
        (CATALOG, "families.0.collectives", (), "Catalog.families[0].collectives"),
        (CATALOG, "families.0.collectives", ("Tree 2",), "Catalog.families[0].collectives[0]"),
        (CATALOG, "families.0.gain_model", "guess", "expected one of energy, ratio, constant"),
        (CATALOG, "families.0.gain_factor", math.nan, "Catalog.families[0].gain_factor"),
        (CATALOG, "families.0.efficiency_exponent", math.inf, "efficiency_exponent"),
        (CATALOG, "families.0.memory_payloads", 0, "Catalog.families[0].memory_payloads"),
        (CATALOG, "families.0.floor_factor", 0.0, "Catalog.families[0].floor_factor"),
        (CATALOG, "families.0.ladder", (), "Catalog.families[0].ladder: expected at least one"),
        (CATALOG, "families.0.ladder", FAMILY.ladder[::-1], "ratios in ascending order"),
        (CATALOG, "families.0.ladder.1.ratio", 0.01, "distinct ratios"),
        (
            CATALOG,
            "families.0.ladder.1.buckets",
            ROUNDS[:1],
            "Catalog.families[0].ladder[1].buckets: expected 2 entries, got 1",
        ),
        (
            CATALOG,
            "families.0.ladder.1.buckets.0.rounds.0.bytes",
            -1,
            "Catalog.families[0].ladder[1].buckets[0].rounds[0].bytes",
        ),
        (CATALOG, "families.0.ladder.1.buckets.0.rounds.0.collective", "ring", "one of all_reduce"),
        (CATALOG, "families", (FAMILY, FAMILY), "Catalog.families[1]: expected an entry"),
        (CATALOG, "calibration.0.elements", 0, "Catalog.calibration[0].elements"),
        (REPORT, "layout", "0" * 16, "Report.layout: expected"),
        (REPORT, "sequence", -1, "Report.sequence"),
        (REPORT, "first_step", 6, "Report.last_step: expected a whole number >= 6, got 5"),
        (REPORT, "plan_id", -1, "Report.plan_id"),
        (REPORT, "lr", math.inf, "Report.lr"),
        (REPORT, "lr", -0.1, "Report.lr"),
        (REPORT, "buckets", (BUCKET,), "Report.buckets: expected 2 entries, got 1"),
        (REPORT, "buckets.0.bucket", 1, "Report.buckets[0].bucket"),
        (REPORT, "buckets.0.wire_bytes", -1, "Report.buckets[0].wire_bytes"),
        (REPORT, "buckets.0.energy", (0.5,), "Report.buckets[0].energy: expected 13 entries"),
        (REPORT, "buckets.0.energy.3", 0.001, "Report.buckets[0].energy[3]: expected a finite"),
        (REPORT, "samples.0.bucket", 2, "Report.samples[0].bucket"),
        (REPORT, "samples.0.bucket", -2, "Report.samples[0].bucket"),
        (REPORT, "samples.0.round", -1, "Report.samples[0].round"),
        (REPORT, "samples.0.bytes", -1, "Report.samples[0].bytes"),
        (REPORT, "samples.0.bytes", 1 << 60, "Report.samples[0].bytes"),
        (REPORT, "samples.0.skip", WORLD, "Report.samples[0].skip"),
        (REPORT, "samples.0.collective", "native", "Report.samples[0].collective"),
        (REPORT, "counters", Counters(steps=-1), "Report.counters.steps"),
        (REPORT, "samples.0.step", -1, "Report.samples[0].step"),
        (CATALOG, "calibration.0.compressor", "", "Catalog.calibration[0].compressor"),
        (
            CATALOG,
            "calibration.0.settings",
            FAMILY.settings[::-1],
            "Catalog.calibration[0].settings: expected distinct names in sorted order",
        ),
        (ACK, "term", -1, "Ack.term"),
        (ACK, "id", -1, "Ack.id"),
        (ACK, "state", "perhaps", "Ack.state: expected one of held, agreed, rejected"),
        (ACK, "step", -1, "Ack.step"),
        (WELCOME, "term", -1, "Welcome.term"),
        (WELCOME, "controller", "", "Welcome.controller"),
        (WELCOME, "plan_ttl_seconds", 0.0, "Welcome.plan_ttl_seconds: expected more than 0"),
        (PLAN, "layout", "0" * 16, "Plan.layout: expected"),
        (PLAN, "interval", 0, "Plan.interval"),
        (PLAN, "term", -1, "Plan.term"),
        (PLAN, "id", -1, "Plan.id"),
        (PLAN, "default.settings", (Setting("a", "\n"),), "Plan.default.settings[0].value"),
        (PLAN, "default.skip", 1, "Plan.default: skip=1 needs an all-reduce of our own"),
        (PLAN, "default.collective", "Tree 2", "Plan.default: option collective must be"),
        (PLAN, "default.compressor", "", "Plan.default.compressor"),
        (PLAN, "default.settings", (Setting("", ""),), "Plan.default.settings[0].name"),
        (PLAN, "assignments.0.bucket", "c", "Plan.assignments[0].bucket: expected a bucket of"),
        (PLAN, "assignments", PLAN.assignments * 2, "Plan.assignments[1]: expected an entry"),
        (PROBE, "id", -1, "ProbeRequest.id"),
        (PROBE, "small_bytes", 0, "ProbeRequest.small_bytes"),
        (PROBE, "large_bytes", 1000, "ProbeRequest.large_bytes"),
        (PROBE, "large_bytes", 1 << 40, "ProbeRequest.large_bytes"),
        (REF, "model", "a\nb", "RunRef.model"),
        (PIN, "model", "a\nb", "PinOrder.model"),
        (REF, "run", "", "RunRef.run"),
        (PIN, "run", "", "PinOrder.run"),
    ],
)
def test_implausible_values_name_field_expectation_and_value(
    message: Any, path: str, value: object, error: str
) -> None:
    with pytest.raises(ProtocolError) as caught:
        check(at(message, path, value))
    assert error in str(caught.value)


def test_skips_are_checked_against_the_world_that_is_given() -> None:
    plan = replace(PLAN, default=Option(collective="ring", skip=3), assignments=())
    validate.validate_plan(plan, LAYOUT, 4)
    with pytest.raises(ProtocolError, match=r"Plan\.default: option skip must lie in 0\.\.2"):
        validate.validate_plan(plan, LAYOUT, 3)


def test_errors_do_not_repeat_long_values() -> None:
    with pytest.raises(ProtocolError) as caught:
        validate.validate_ref(RunRef("x" * 100_000))
    assert len(str(caught.value)) < 300

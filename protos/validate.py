"""Whether what a peer sent can be true: one check per incoming message.

Every check either returns or raises ``ProtocolError`` with the field, what was expected and what
came. The controller checks what agents and operators send, the agent checks what the controller
sends; nothing that failed a check may reach a model fit (one NaN wins a Pareto front) or the
gradient path. Checks are pure functions of the dataclasses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gradpilot.errors import ConfigError, ProtocolError
from gradpilot.protos.messages import (
    COLLECTIVES,
    ENERGY_RATIOS,
    MAGNITUDE_BINS,
    PROTOCOL_VERSION,
    REQUESTS,
    Ack,
    BucketReport,
    Catalog,
    ComputeSample,
    Counters,
    Family,
    GoingAway,
    Hello,
    Layout,
    Option,
    PinOrder,
    Plan,
    ProbeRequest,
    Report,
    RunRef,
    Setting,
    Welcome,
    WireSample,
    check_option,
    is_carrier,
)

MAX_SECONDS = 7 * 86400.0
"""Longest believable duration: no step, and no wait that a peer asks for, lasts a week."""

MAX_PAYLOAD_BYTES = 1 << 42
"""Largest believable payload of one step on one rank, 4 TiB."""

MAX_PROBE_BYTES = 256 << 20
"""Largest payload that a probe may ask every rank to allocate."""

MAX_RANKS = 1 << 20
"""Largest believable world size."""

MAX_NAME = 256
"""Longest run id, model, host or other name, in characters."""

SLACK = 1e-3
"""How far rounding may carry a share of a norm above 1 (fp32 sums over a large bucket)."""


# --- what agents send --------------------------------------------------------------------------


def validate_hello(hello: Hello) -> None:
    """Check who is there.

    Raises:
        ProtocolError: Also if the protocol version is another one.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        raise _wrong(
            "Hello.protocol_version",
            f"{PROTOCOL_VERSION} (use the same gradpilot on both sides)",
            hello.protocol_version,
        )
    for name in ("run", "model", "incarnation"):
        _name(f"Hello.{name}", getattr(hello, name))
    for name in ("node", "agent_version", "backend", "device", "torch_version"):
        _name(f"Hello.{name}", getattr(hello, name), empty=True)
    _whole("Hello.world_size", hello.world_size, 1, MAX_RANKS)
    _whole("Hello.rank", hello.rank, 0, hello.world_size - 1)
    _whole("Hello.local_rank", hello.local_rank, 0, hello.world_size - 1)
    _whole("Hello.step", hello.step)
    if hello.plan is not None:
        _plan("Hello.plan", hello.plan, hello.world_size)


def validate_catalog(catalog: Catalog) -> None:
    """Check what an agent says that it can do; every ladder must fit the layout."""
    _layout("Catalog.layout", catalog.layout)
    buckets = len(catalog.layout.buckets)
    for i, family in enumerate(catalog.families):
        _family(f"Catalog.families[{i}]", family, buckets)
    _unique("Catalog.families", [(f.compressor, f.settings) for f in catalog.families])
    for i, ability in enumerate(catalog.abilities):
        _name(f"Catalog.abilities[{i}].compressor", ability.compressor)
        _carriers(f"Catalog.abilities[{i}].collectives", ability.collectives)
    _unique("Catalog.abilities", [a.compressor for a in catalog.abilities])
    for i, sample in enumerate(catalog.calibration):
        _compute_sample(f"Catalog.calibration[{i}]", sample)


def validate_report(report: Report, layout: Layout, world_size: int) -> None:
    """Check the measurements of one window.

    Args:
        report: What came.
        layout: Layout of the sender's newest catalog. A report on another one is refused, since
            its indices mean other buckets; after a rebuild the caller drops late ones first.
        world_size: World size that the sender's Hello named.
    """
    if report.layout != layout.digest:
        raise _wrong("Report.layout", f"{layout.digest!r} as in the catalog", report.layout)
    for name in ("sequence", "first_step", "plan_term", "plan_id"):
        _whole(f"Report.{name}", getattr(report, name))
    _whole("Report.last_step", report.last_step, report.first_step)
    for name in ("step_seconds", "compute_seconds", "exposed_seconds"):
        _seconds(f"Report.{name}", getattr(report, name))
    for i, sample in enumerate(report.samples):
        _wire_sample(f"Report.samples[{i}]", sample, len(layout.buckets), world_size)
    _length("Report.buckets", report.buckets, len(layout.buckets))
    for i, bucket in enumerate(report.buckets):
        _bucket_report(f"Report.buckets[{i}]", bucket, i)
    for name in Counters.__dataclass_fields__:
        _whole(f"Report.counters.{name}", getattr(report.counters, name))
    # The loss is the user's: a diverged run reports inf or NaN, and its timings still count.
    if not math.isnan(report.lr):
        _number("Report.lr", report.lr, 0.0, math.inf)


def validate_ack(ack: Ack) -> None:
    """Check what an agent says became of a plan."""
    _whole("Ack.term", ack.term)
    _whole("Ack.id", ack.id)
    _one_of("Ack.state", ack.state, ("held", "agreed", "rejected"))
    _whole("Ack.step", ack.step)


# --- what the controller sends -----------------------------------------------------------------


def validate_welcome(welcome: Welcome) -> None:
    """Check the controller's answer to Hello."""
    _name("Welcome.controller", welcome.controller)
    _whole("Welcome.term", welcome.term)
    for name in ("report_seconds", "plan_ttl_seconds"):
        value = getattr(welcome, name)
        _seconds(f"Welcome.{name}", value)
        if value == 0:
            raise _wrong(f"Welcome.{name}", "more than 0", value)


def validate_plan(plan: Plan, layout: Layout, world_size: int) -> None:
    """Check a plan before a rank holds it or agrees to it.

    Whether the compressors it names exist is for the caller, who has the registry.

    Args:
        plan: What came.
        layout: Present layout of this rank.
        world_size: Ranks in the group of the model.
    """
    if plan.layout != layout.digest:
        raise _wrong("Plan.layout", f"{layout.digest!r} as on this rank", plan.layout)
    _plan("Plan", plan, world_size)
    known = {bucket.fingerprint for bucket in layout.buckets}
    for i, assignment in enumerate(plan.assignments):
        if assignment.bucket not in known:
            raise _wrong(
                f"Plan.assignments[{i}].bucket", "a bucket of the layout", assignment.bucket
            )


def validate_probe_request(request: ProbeRequest) -> None:
    """Check a probe; its two sizes must differ, or the fit learns nothing."""
    _whole("ProbeRequest.id", request.id)
    _whole("ProbeRequest.small_bytes", request.small_bytes, 1, MAX_PROBE_BYTES - 1)
    _whole(
        "ProbeRequest.large_bytes", request.large_bytes, request.small_bytes + 1, MAX_PROBE_BYTES
    )


def validate_going_away(message: GoingAway) -> None:
    """Check the controller's farewell."""
    _seconds("GoingAway.reconnect_seconds", message.reconnect_seconds)


# --- what operators send -----------------------------------------------------------------------


def validate_ref(ref: RunRef) -> None:
    """Check a reference to a run."""
    _name("RunRef.run", ref.run)
    _name("RunRef.model", ref.model, empty=True)


def validate_pin(order: PinOrder, world_size: int) -> None:
    """Check an operator's option.

    Args:
        order: What came.
        world_size: Ranks of the run that it names.
    """
    _name("PinOrder.run", order.run)
    _name("PinOrder.model", order.model, empty=True)
    _option("PinOrder.option", order.option, world_size)


# --- parts of messages -------------------------------------------------------------------------


def _plan(path: str, plan: Plan, world_size: int) -> None:
    _whole(f"{path}.term", plan.term)
    _whole(f"{path}.id", plan.id)
    _whole(f"{path}.interval", plan.interval, 1)
    _option(f"{path}.default", plan.default, world_size)
    for i, assignment in enumerate(plan.assignments):
        _option(f"{path}.assignments[{i}].option", assignment.option, world_size)
    _unique(f"{path}.assignments", [a.bucket for a in plan.assignments])


def _option(path: str, option: Option, world_size: int) -> None:
    try:
        check_option(option, world_size)
    except ConfigError as error:
        raise ProtocolError(f"{path}: {error}") from None
    _name(f"{path}.compressor", option.compressor)
    _settings(f"{path}.settings", option.settings)


def _settings(path: str, settings: tuple[Setting, ...]) -> None:
    names = [setting.name for setting in settings]
    for i, setting in enumerate(settings):
        _name(f"{path}[{i}].name", setting.name)
        _name(f"{path}[{i}].value", setting.value, empty=True)
    if names != sorted(set(names)):
        raise _wrong(path, "distinct names in sorted order", names)


def _layout(path: str, layout: Layout) -> None:
    if not layout.buckets:
        raise _wrong(f"{path}.buckets", "at least one bucket", layout.buckets)
    for i, bucket in enumerate(layout.buckets):
        where = f"{path}.buckets[{i}]"
        _name(f"{where}.fingerprint", bucket.fingerprint)
        _whole(f"{where}.index", bucket.index, i, i)
        _whole(f"{where}.elements", bucket.elements, 1, MAX_PAYLOAD_BYTES)
        _name(f"{where}.dtype", bucket.dtype)
        _whole(f"{where}.parameters", bucket.parameters, 1, bucket.elements)
    _unique(f"{path}.buckets", [bucket.fingerprint for bucket in layout.buckets])
    expected = Layout.of(layout.buckets).digest
    if layout.digest != expected:
        raise _wrong(f"{path}.digest", f"{expected!r}, the digest of its buckets", layout.digest)


def _carriers(path: str, names: Sequence[str]) -> None:
    if not names:
        raise _wrong(path, "at least one collective", names)
    for i, name in enumerate(names):
        if not is_carrier(name):
            raise _wrong(f"{path}[{i}]", "a name of letters a to z and _, at most 32", name)


def _family(path: str, family: Family, buckets: int) -> None:
    _name(f"{path}.compressor", family.compressor)
    _settings(f"{path}.settings", family.settings)
    _carriers(f"{path}.collectives", family.collectives)
    _one_of(f"{path}.gain_model", family.gain_model, ("energy", "ratio", "constant"))
    _number(f"{path}.gain_factor", family.gain_factor, 0.0, math.inf)
    _number(f"{path}.efficiency_exponent", family.efficiency_exponent, 0.0, math.inf)
    _whole(f"{path}.memory_payloads", family.memory_payloads, 1, MAX_RANKS)
    _ratio(f"{path}.floor_factor", family.floor_factor)
    if not family.ladder:
        raise _wrong(f"{path}.ladder", "at least one ratio", family.ladder)
    for i, point in enumerate(family.ladder):
        where = f"{path}.ladder[{i}]"
        _ratio(f"{where}.ratio", point.ratio)
        _length(f"{where}.buckets", point.buckets, buckets)
        for j, bucket in enumerate(point.buckets):
            for k, round_ in enumerate(bucket.rounds):
                at = f"{where}.buckets[{j}].rounds[{k}]"
                _one_of(f"{at}.collective", round_.collective, REQUESTS)
                _whole(f"{at}.bytes", round_.bytes, 0, MAX_PAYLOAD_BYTES)
    ratios = [point.ratio for point in family.ladder]
    if ratios != sorted(set(ratios)):
        raise _wrong(f"{path}.ladder", "distinct ratios in ascending order", ratios)


def _compute_sample(path: str, sample: ComputeSample) -> None:
    _name(f"{path}.compressor", sample.compressor)
    _settings(f"{path}.settings", sample.settings)
    _ratio(f"{path}.ratio", sample.ratio)
    _whole(f"{path}.elements", sample.elements, 1, MAX_PAYLOAD_BYTES)
    _seconds(f"{path}.compress_seconds", sample.compress_seconds)
    _seconds(f"{path}.decompress_seconds", sample.decompress_seconds)


def _wire_sample(path: str, sample: WireSample, buckets: int, world_size: int) -> None:
    _whole(f"{path}.step", sample.step)
    _whole(f"{path}.bucket", sample.bucket, -1, buckets - 1)
    _whole(f"{path}.round", sample.round)
    _one_of(f"{path}.collective", sample.collective, COLLECTIVES)
    _whole(f"{path}.bytes", sample.bytes, 0, MAX_PAYLOAD_BYTES)
    _whole(f"{path}.skip", sample.skip, 0, world_size - 1)
    _seconds(f"{path}.seconds", sample.seconds)
    _seconds(f"{path}.overlapped_seconds", sample.overlapped_seconds)


def _bucket_report(path: str, report: BucketReport, index: int) -> None:
    _whole(f"{path}.bucket", report.bucket, index, index)
    for name in ("ready_seconds", "compress_seconds", "decompress_seconds", "wire_seconds"):
        _seconds(f"{path}.{name}", getattr(report, name))
    _whole(f"{path}.wire_bytes", report.wire_bytes, 0, MAX_PAYLOAD_BYTES)
    if report.gain != -1:
        _number(f"{path}.gain", report.gain, 0.0, 1.0 + SLACK)
    for name in ("gradient_sq", "residual_sq", "mean_sq"):
        if getattr(report, name) != -1:
            _number(f"{path}.{name}", getattr(report, name), 0.0, math.inf)
    if report.energy:
        _length(f"{path}.energy", report.energy, len(ENERGY_RATIOS))
        least = 0.0
        for i, energy in enumerate(report.energy):
            _number(f"{path}.energy[{i}]", energy, least, 1.0 + SLACK)
            least = energy
    if report.magnitudes:
        _length(f"{path}.magnitudes", report.magnitudes, MAGNITUDE_BINS)
        for i, count in enumerate(report.magnitudes):
            _whole(f"{path}.magnitudes[{i}]", count, 0, MAX_PAYLOAD_BYTES)


# --- single values -----------------------------------------------------------------------------


def _wrong(path: str, expected: str, value: object) -> ProtocolError:
    return ProtocolError(f"{path}: expected {expected}, got {repr(value)[:80]}")


def _number(path: str, value: float, least: float, most: float) -> None:
    """Check a finite number; ``most`` may be infinite, the value may not. NaN fails both."""
    if not (least <= value <= most and value < math.inf):
        limit = "" if most == math.inf else f" and <= {most:g}"
        raise _wrong(path, f"a finite number >= {least:g}{limit}", value)


def _seconds(path: str, value: float) -> None:
    _number(path, value, 0.0, MAX_SECONDS)


def _ratio(path: str, value: float) -> None:
    if not (0.0 < value <= 1.0):
        raise _wrong(path, "a ratio in (0, 1]", value)


def _whole(path: str, value: int, least: int = 0, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        limit = f"{least} .. {most}" if most is not None else f">= {least}"
        raise _wrong(path, f"a whole number {limit}", value)


def _name(path: str, value: str, *, empty: bool = False) -> None:
    """Check text that becomes a key, a label or part of a log line."""
    if len(value) > MAX_NAME or not value.isprintable() or not (value or empty):
        kind = "text" if empty else "non-empty text"
        raise _wrong(path, f"printable {kind} of at most {MAX_NAME} characters", value)


def _one_of(path: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise _wrong(path, f"one of {', '.join(known)}", value)


def _length(path: str, values: Sequence[object], expected: int) -> None:
    if len(values) != expected:
        raise ProtocolError(f"{path}: expected {expected} entries, got {len(values)}")


def _unique(path: str, keys: Sequence[object]) -> None:
    seen: set[object] = set()
    for i, key in enumerate(keys):
        if key in seen:
            raise _wrong(f"{path}[{i}]", "an entry that did not come before", key)
        seen.add(key)

"""Every Prometheus metric of the controller: name, help, unit and where its value comes from.

Values are read from the runs at each scrape, so a series cannot outlive its run and an info metric
cannot keep an old label. Labels are ``run`` and ``model`` only (plus words from fixed lists): never
a rank, a bucket, a step, ``job`` or ``instance``. Both are clipped, and ``max_runs`` bounds them.
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gradpilot import __version__
from gradpilot.controller.plans import dominant
from gradpilot.controller.run import REFUSALS, Run
from gradpilot.controller.runs import Runs
from gradpilot.controller.totals import OUTCOMES
from gradpilot.controller.window import Measured
from gradpilot.policies.blacklist import CAUSES
from gradpilot.protos.messages import Option, Plan

PREFIX = "gradpilot_"
MAX_LABEL = 64
"""Longest value of a label that comes from outside."""

RUN_LABELS = ("run", "model")


@dataclass(frozen=True, slots=True)
class View:
    """One run at one scrape; what its metrics are computed from."""

    run: Run
    now: float
    measured: Measured | None
    plan: Plan | None
    option: Option | None

    @staticmethod
    def of(run: Run, now: float) -> View:
        """Return the view of a run."""
        plan = run.in_force() or run.plans.newest
        option = dominant(plan, run.layout) if plan is not None else None
        return View(run, now, run.measured(), plan, option)


Value = Callable[[View], float | None]


def _measured(name: str) -> Value:
    return lambda view: getattr(view.measured, name) if view.measured is not None else None


def _total(name: str) -> Value:
    return lambda view: view.run.totals[name]


def _known(value: float | None) -> float | None:
    return value if value is not None and value >= 0 else None


def _bandwidth(view: View) -> float | None:
    link = view.run.link
    return 1 / link.beta_seconds_per_byte if link and link.beta_seconds_per_byte > 0 else None


def _prediction_ratio(view: View) -> float | None:
    predicted = view.run.predicted_step_seconds
    if view.measured is None or not (predicted > 0 and view.measured.step_seconds > 0):
        return None
    return view.measured.step_seconds / predicted


def _kept_ratio(view: View) -> float | None:
    plan, layout = view.plan, view.run.layout
    if plan is None or layout is None:
        return None
    kept = sum(plan.option(b.fingerprint).ratio * b.elements for b in layout.buckets)
    return kept / max(layout.elements, 1)


GAUGES: tuple[tuple[str, str, Value], ...] = (
    ("ranks", "Ranks with an open session.", lambda v: v.run.connected),
    ("world_size", "Ranks of the job.", lambda v: v.run.world_size),
    ("step", "Newest step reported.", lambda v: v.run.step),
    ("step_seconds", "Measured median step time.", _measured("step_seconds")),
    (
        "predicted_step_seconds",
        "Step time that the newest decision predicts for the plan in force.",
        lambda v: _known(v.run.predicted_step_seconds),
    ),
    (
        "step_prediction_ratio",
        "Measured step time over the one that the newest decision predicts for the plan in force.",
        _prediction_ratio,
    ),
    ("compute_seconds", "Step time less exposed time, slowest rank.", _measured("compute_seconds")),
    (
        "exposed_seconds",
        "Time of a step that synchronisation sticks out behind backward.",
        _measured("exposed_seconds"),
    ),
    (
        "compression_seconds",
        "Compress and decompress time of a step, slowest rank.",
        _measured("compression_seconds"),
    ),
    (
        "synchronisation_seconds",
        "Time of a step on the wire, fastest rank of each bucket.",
        _measured("synchronisation_seconds"),
    ),
    (
        "straggle_seconds",
        "Time of a step that the median rank waits in collectives for slower ranks.",
        _measured("straggle_seconds"),
    ),
    (
        "link_latency_seconds",
        "Fitted one-way latency of a message.",
        lambda v: v.run.link.alpha_seconds if v.run.link else None,
    ),
    ("link_bandwidth_bytes_per_second", "Fitted bandwidth of one hop.", _bandwidth),
    (
        "link_age_seconds",
        "Age of the newest operation in the link fit.",
        lambda v: v.run.link_age(v.now) if v.run.link else None,
    ),
    (
        "gain_ratio",
        "Share of the squared gradient norm that is sent.",
        lambda v: _known(v.measured.gain) if v.measured else None,
    ),
    ("wire_ratio", "Wire bytes of a step over its dense fp32 bytes.", _measured("wire_ratio")),
    ("plan_id", "Number of the plan in force.", lambda v: v.plan.id if v.plan else 0),
    ("plan_kept_ratio", "Kept fraction of all elements under the plan.", _kept_ratio),
    (
        "plan_skip_steps",
        "Ring steps that the option of most elements leaves out.",
        lambda v: v.option.skip if v.option else None,
    ),
    (
        "front_size",
        "Points of the newest decision's Pareto set.",
        lambda v: len(v.run.decision.front) if v.run.decision else None,
    ),
    (
        "blacklisted_options",
        "Options that did harm and are not chosen for a while.",
        lambda v: sum(ban.step <= v.run.step < ban.until for ban in v.run.history.bans),
    ),
    ("frozen", "1 if an operator froze the decisions.", lambda v: float(v.run.frozen)),
    ("pinned", "1 if an operator pinned an option.", lambda v: float(v.run.pinned is not None)),
    (
        "loss",
        "Newest loss given to handle.observe, mean over the ranks whose loss is finite.",
        lambda v: v.measured.loss if v.measured and not math.isnan(v.measured.loss) else None,
    ),
    (
        "emulated",
        "1 if the link is emulated by delays inside the agents.",
        lambda v: float(any(m.hello.emulated for m in v.run.members.values())),
    ),
)
"""Gauges of one run: name without prefix, help, value (None: no series)."""

COUNTERS: tuple[tuple[str, str, Value], ...] = (
    ("wire_bytes", "Payload bytes handed to collectives by all ranks.", _total("wire_bytes")),
    ("dense_bytes", "Bytes that fp32 all-reduce would have taken.", _total("dense_bytes")),
    ("switches", "Plan switches that the ranks carried out.", _total("switches")),
    ("policy_errors", "Decisions that failed.", lambda v: v.run.decisions.outcomes["error"]),
    ("reports", "Reports taken.", lambda v: v.run.reports_taken),
    (
        "probe_repeats",
        "Probes of the link that a policy wanted while one was under way; not sent.",
        lambda v: v.run.probes.repeats,
    ),
    (
        "agent_reports_dropped",
        "Reports that agents dropped from a full queue.",
        _total("reports_dropped"),
    ),
    ("nonfinite_steps", "Steps with a non-finite gradient on any rank.", _total("nonfinite_steps")),
    (
        "agreement_failures",
        "Agreements of the ranks that ended without a verdict.",
        _total("agreement_failures"),
    ),
    ("plans_rejected", "Plans that a rank refused.", _total("plans_rejected")),
    ("residual_resets", "Residuals that were thrown away.", _total("residual_resets")),
)
"""Counters of one run: name without prefix and ``_total``, help, value."""


def label(text: str) -> str:
    """Return a label value of bounded length; texts that differ stay different."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    if clean == text and len(text) <= MAX_LABEL:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
    return f"{clean[: MAX_LABEL - 9]}~{digest}"


@dataclass(slots=True)
class ServerStats:
    """What belongs to the process and not to a run.

    Attributes:
        sessions: Open sessions.
        term: Term of this controller.
        sessions_refused: Sessions ended with an error status, by status code name.
        solver_restarts: Times the policy process was replaced.
    """

    sessions: Callable[[], int]
    term: Callable[[], int]
    solver_restarts: Callable[[], int]
    sessions_refused: dict[str, int]


class RunCollector(Collector):
    """Reads all runs at a scrape.

    Args:
        runs: All runs.
        server: Values of the process.
    """

    def __init__(self, runs: Runs, server: ServerStats) -> None:
        self._runs = runs
        self._server = server

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        now = time.monotonic()
        yield from self._process()
        rows = [
            ((label(run.run), label(run.model)), View.of(run, now))
            for run in sorted(self._runs, key=lambda r: (r.run, r.model))
        ]
        for name, text, value in GAUGES:
            yield _fill(GaugeMetricFamily(PREFIX + name, text, labels=RUN_LABELS), value, rows)
        for name, text, value in COUNTERS:
            yield _fill(CounterMetricFamily(PREFIX + name, text, labels=RUN_LABELS), value, rows)
        yield from _labelled(rows)

    def _process(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(
            f"{PREFIX}build_info", "Version of the controller; 1.", labels=("version", "python")
        )
        build.add_metric((__version__, platform.python_version()), 1)
        yield build
        for name, text, value in (
            ("runs", "Runs and models in memory.", len(self._runs)),
            ("sessions", "Open sessions of agents.", self._server.sessions()),
            ("term", "Term of this controller; grows with every start.", self._server.term()),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        yield CounterMetricFamily(
            f"{PREFIX}solver_restarts",
            "Times the policy process was replaced.",
            value=self._server.solver_restarts(),
        )
        refused = CounterMetricFamily(
            f"{PREFIX}sessions_refused",
            "Sessions that the controller ended with an error, by status code.",
            labels=("code",),
        )
        for code, count in sorted(self._server.sessions_refused.items()):
            refused.add_metric((code,), count)
        yield refused


def registry(runs: Runs, server: ServerStats) -> CollectorRegistry:
    """Return a registry of our own, so that two controllers in one process do not collide."""
    own = CollectorRegistry()
    own.register(RunCollector(runs, server))
    return own


Rows = Sequence[tuple[tuple[str, str], View]]


def _fill(family: Metric, value: Value, rows: Rows) -> Metric:
    for labels, view in rows:
        number = value(view)
        if number is not None:
            family.add_metric(labels, number)  # type: ignore[attr-defined]
    return family


def _labelled(rows: Rows) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        f"{PREFIX}plan_info",
        "What most elements get under the plan in force; 1.",
        labels=(*RUN_LABELS, "compressor", "collective"),
    )
    decisions = CounterMetricFamily(
        f"{PREFIX}decisions", "Decisions by outcome.", labels=(*RUN_LABELS, "outcome")
    )
    refused = CounterMetricFamily(
        f"{PREFIX}reports_refused",
        "Messages of agents that were refused, by reason.",
        labels=(*RUN_LABELS, "reason"),
    )
    undone = CounterMetricFamily(
        f"{PREFIX}plans_undone",
        "Plans that a guard undid, by reason.",
        labels=(*RUN_LABELS, "reason"),
    )
    seconds = HistogramMetricFamily(
        f"{PREFIX}decision_seconds", "Time that deciding took.", labels=RUN_LABELS
    )
    errors = HistogramMetricFamily(
        f"{PREFIX}step_prediction_error_ratio",
        "How far measured step times were from those predicted a decision before, as a share.",
        labels=RUN_LABELS,
    )
    recent = GaugeMetricFamily(
        f"{PREFIX}recent_prediction_error_ratio",
        "Median of the newest of these errors by the compressor of the plan.",
        labels=(*RUN_LABELS, "compressor"),
    )
    for labels, view in rows:
        if view.option is not None:
            info.add_metric((*labels, label(view.option.compressor), view.option.collective), 1)
        for outcome in OUTCOMES:
            decisions.add_metric((*labels, outcome), view.run.decisions.outcomes[outcome])
        for reason in REFUSALS:
            refused.add_metric((*labels, reason), view.run.refused[reason])
        for cause in CAUSES:
            undone.add_metric((*labels, cause), view.run.decisions.undone[cause])
        spent, off = view.run.decisions.seconds, view.run.predictions.errors
        seconds.add_metric(labels, spent.rows(), sum_value=spent.sum)
        errors.add_metric(labels, off.rows(), sum_value=off.sum)
        for compressor, error in view.run.predictions.by_compressor().items():
            recent.add_metric((*labels, label(compressor)), error)
    yield info
    yield decisions
    yield refused
    yield undone
    yield seconds
    yield errors
    yield recent

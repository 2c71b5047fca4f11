"""The charts of the report, each one SVG element."""

from __future__ import annotations

from collections.abc import Sequence

from gradpilot.demo.records import Accuracy, Switch
from gradpilot.demo.result import Runs
from gradpilot.demo.schedule import Phase
from gradpilot.demo.svg import WIDTH, Canvas, Scale
from gradpilot.protos.messages import Candidate, Decision

LEFT, RIGHT = 52.0, WIDTH - 12.0

PLAN_COLOURS = 6
"""Colours of plans that the style sheet has, ``--plan0`` and so on."""

SHOWN = 0.25
"""Accuracies further below the best one than this are not drawn."""

ADAPTIVE = 'class="adaptive"'
BASELINE = 'class="baseline"'


def step_times(runs: Runs) -> str:
    """Return the time of every step in both runs, phases shaded."""
    canvas, steps = Canvas("Step time over steps", 300.0), runs.settings.schedule.steps
    series = [r[0].step_seconds for r in (runs.adaptive, runs.baseline)]
    x = Scale((0, steps), LEFT, RIGHT, zero=True)
    x.high = float(steps)
    y = Scale([1e3 * s for one in series for s in one], 256.0, 42.0, log=True)
    _shade(canvas, runs, x, 42.0, 256.0)
    canvas.left_axis(y, LEFT, RIGHT, "ms a step, logarithmic")
    for seconds, css in zip(reversed(series), (BASELINE, ADAPTIVE), strict=True):
        canvas.line([(x(i), y(1e3 * s)) for i, s in enumerate(seconds)], css)
    canvas.bottom_axis(x, 256.0, "step")
    _legend(canvas, (("gradpilot", ADAPTIVE), ("static bf16", BASELINE)))
    return canvas.render()


def accuracies(runs: Runs) -> str:
    """Return test accuracy over training time for both runs."""
    canvas = Canvas("Test accuracy over training time", 280.0)
    series = [r[0].accuracy for r in (runs.adaptive, runs.baseline)]
    best = max(a.accuracy for one in series for a in one)
    # The climb out of chance would flatten everything that matters.
    series = [tuple(a for a in one if a.accuracy >= best - SHOWN) for one in series]
    x = Scale([a.seconds for one in series for a in one], LEFT, RIGHT, zero=True)
    y = Scale([100 * a.accuracy for one in series for a in one], 236.0, 36.0)
    canvas.left_axis(y, LEFT, RIGHT, "test accuracy, %")
    for points, css in zip(reversed(series), (BASELINE, ADAPTIVE), strict=True):
        _accuracy_line(canvas, points, x, y, css)
    canvas.bottom_axis(x, 236.0, "training time over the emulated link, s")
    _legend(canvas, (("gradpilot", ADAPTIVE), ("static bf16", BASELINE)))
    return canvas.render()


def links(runs: Runs) -> str:
    """Return estimated against emulated latency and bandwidth over steps."""
    canvas, steps = Canvas("Link estimate against the emulated link", 470.0), runs.settings.schedule
    x = Scale((0, steps.steps), LEFT, RIGHT, zero=True)
    x.high = float(steps.steps)
    found = [(d.step, d.link) for d, _ in runs.decisions if d.link is not None]
    latency = [(step, 1e3 * link.alpha_seconds) for step, link in found]
    rate = [
        (step, 8e-6 / link.beta_seconds_per_byte)
        for step, link in found
        if link.beta_seconds_per_byte > 0
    ]
    panels = (
        ("latency, ms", latency, [1e3 * p.latency_seconds for p in steps.phases], 42.0, 210.0),
        ("bandwidth, Mbit/s", rate, [1e-6 * p.bits_per_second for p in steps.phases], 258.0, 426.0),
    )
    for label, estimates, truths, top, bottom in panels:
        y = Scale([*truths, *(v for _, v in estimates if v > 0)], bottom, top, log=True)
        _shade(canvas, runs, x, top, bottom, names=top < 100)
        canvas.left_axis(y, LEFT, RIGHT, label)
        for (phase, end), truth in zip(steps.spans(), truths, strict=True):
            canvas.line([(x(phase.first_step), y(truth)), (x(end), y(truth))], 'class="truth"')
        for step, value in estimates:
            tip = f"step {step}: {value:.3g} {label.split(', ')[1]}"
            if value > 0:
                canvas.circle(x(step), y(value), 3.2, 'class="estimate"', tip)
    canvas.bottom_axis(x, 426.0, "step")
    _legend(canvas, (("estimate of a decision", 'class="adaptive"'), ("emulated", 'class="truth"')))
    return canvas.render()


def plans(runs: Runs) -> str:
    """Return which options were in force at each step."""
    found = runs.adaptive[0].switches
    labels = list(dict.fromkeys(" + ".join(s.options) for s in found))
    height = 60.0 + 26.0 * len(labels)
    canvas, steps = Canvas("Plan in force over steps", height + 46.0), runs.settings.schedule.steps
    left = 178.0
    x = Scale((0, steps), left, RIGHT, zero=True)
    x.high = float(steps)
    _shade(canvas, runs, x, 30.0, height)
    for row, label in enumerate(labels):
        y = 42.0 + 26.0 * row
        canvas.text(left - 8, y + 14, label, 'class="tick"', "end")
        for start, end, switch in _stretches(found, steps):
            if " + ".join(switch.options) == label:
                css = f'style="fill:var(--plan{row % PLAN_COLOURS})"'
                tip = f"steps {start} to {end - 1}: {label} (plan {switch.plan_id})"
                canvas.rect(x(start), y, max(x(end) - x(start), 2.0), 19.0, css, tip)
    canvas.bottom_axis(x, height, "step")
    return canvas.render()


def front(decision: Decision) -> str:
    """Return the Pareto front of one decision: loss of progress against time on the wire."""
    width = 420.0
    canvas = Canvas(f"Pareto front of decision {decision.id}", 250.0, width)
    extra = [c for c in (decision.current, decision.chosen) if c is not None]
    every = [*decision.front, *extra]
    x = Scale([1e3 * c.synchronisation_seconds for c in every], 52.0, width - 12.0, log=True)
    y = Scale([c.statistical_loss for c in every], 204.0, 34.0, zero=True)
    canvas.left_axis(y, 52.0, width - 12.0, "statistical loss")
    for candidate in decision.front:
        kind = "gather" if candidate.options[0].collective == "allgather" else "reduce"
        _point(canvas, candidate, x, y, 3.6, f'class="{kind}"')
    if decision.current is not None:
        _point(canvas, decision.current, x, y, 7.0, 'class="current"')
    if decision.chosen is not None:
        _point(canvas, decision.chosen, x, y, 7.0, 'class="chosen"')
    canvas.bottom_axis(x, 204.0, "on the wire in a step, ms, logarithmic")
    return canvas.render()


# --- pieces ------------------------------------------------------------------------------------


def _shade(
    canvas: Canvas, runs: Runs, x: Scale, top: float, bottom: float, names: bool = True
) -> None:
    """Shade every other phase and write the names above."""
    for number, (phase, end) in enumerate(runs.settings.schedule.spans()):
        start, width = x(phase.first_step), x(end) - x(phase.first_step)
        css = f'class="phase{number % 2}"'
        canvas.rect(start, top, width, bottom - top, css, phase_text(phase))
        if names:
            canvas.text(start + width / 2, top - 5, phase.name, 'class="phase"', "middle")


def phase_text(phase: Phase) -> str:
    """Return a phase's link for people."""
    rate = phase.bits_per_second
    bandwidth = f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"
    return f"{phase.name}: {1e3 * phase.latency_seconds:g} ms one way, {bandwidth}"


def _legend(canvas: Canvas, entries: Sequence[tuple[str, str]]) -> None:
    at = RIGHT
    for name, css in reversed(entries):
        at -= 8.0 + 6.6 * len(name)
        canvas.text(at, 14.0, name, 'class="tick"')
        canvas.line([(at - 24.0, 10.0), (at - 6.0, 10.0)], css)
        at -= 36.0


def _accuracy_line(
    canvas: Canvas, points: Sequence[Accuracy], x: Scale, y: Scale, css: str
) -> None:
    canvas.line([(x(p.seconds), y(100 * p.accuracy)) for p in points], css)
    for p in points:
        tip = f"step {p.step}, {p.seconds:.1f} s: {100 * p.accuracy:.2f} %"
        dot = css.replace('class="', 'class="dot ')
        canvas.circle(x(p.seconds), y(100 * p.accuracy), 2.6, dot, tip)


def _stretches(switches: Sequence[Switch], steps: int) -> list[tuple[int, int, Switch]]:
    starts = [s.step for s in switches]
    return [(a, b, s) for a, b, s in zip(starts, [*starts[1:], steps], switches, strict=True)]


def _point(
    canvas: Canvas, candidate: Candidate, x: Scale, y: Scale, radius: float, css: str
) -> None:
    tip = (
        f"{' + '.join(o.label for o in candidate.options)}: gain {candidate.gain:.2f}, compression"
        f" {1e3 * candidate.compression_seconds:.3g} ms, wire"
        f" {1e3 * candidate.synchronisation_seconds:.3g} ms, step"
        f" {1e3 * candidate.step_seconds:.3g} ms"
    )
    at = 1e3 * candidate.synchronisation_seconds
    canvas.circle(x(at), y(candidate.statistical_loss), radius, css, tip)

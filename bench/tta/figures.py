"""Charts of finished rows: the metric over time, and step times with the plans beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tta.networks import NETWORKS, Network
from bench.tta.reached import smooth
from bench.tta.report import OURS, step_seconds
from bench.tta.tasks import TASKS
from gradpilot.demo.svg import WIDTH, Canvas, Scale

Row = Mapping[str, Any]

LEFT, RIGHT = 58.0, WIDTH - 128.0
TOP, BOTTOM = 40.0, 300.0

COLOURS = (
    "#1f77b4", "#8c564b", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#7f7f7f", "#bcbd22",
)  # fmt: skip
OWN_COLOUR = "#d62728"

STYLE = (
    "<style>text{font:11px sans-serif;fill:#333}.grid{stroke:#e4e4e4;fill:none}"
    ".axis{stroke:#888;fill:none}.label{font-weight:bold}svg{background:#fff}</style>"
)

SHOWN = 0.25
"""Values further from the best one than this share of it are left out: the climb out of chance
would flatten all that matters."""

AROUND = 7
"""Steps over whose median a step's time is drawn."""


def write(finished: Sequence[Row], folder: Path) -> list[Path]:
    """Draw the first seed of every task and network; return the files.

    Args:
        finished: Finished rows.
        folder: Made if it is not there.
    """
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in finished:
        first = min(
            r["seed"]
            for r in finished
            if (r["task"], r["network"]) == (row["task"], row["network"])
        )
        if row["seed"] == first:
            groups.setdefault((row["task"], row["network"], first), []).append(row)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for (task, network, seed), rows in groups.items():
        charts = {"reached": reached(rows), "steps": steps(rows)}
        for kind, chart in charts.items():
            path = folder / f"tta-{task}-{network}-{seed}-{kind}.svg"
            path.write_text(standalone(chart), encoding="utf-8")
            written.append(path)
    return written


def reached(rows: Sequence[Row]) -> str:
    """Return the smoothed metric of every method over the time of the training."""
    task, network = TASKS[rows[0]["task"]], _network(rows)
    canvas = Canvas(f"{task.metric} of {task.name} on {network.name}", 350.0)
    curves = {row["method"]: _curve(row) for row in rows}
    every = [value for curve in curves.values() for _, value in curve]
    if every:
        best = max(every) if task.more_is_better else min(every)
        curves = {
            name: [point for point in curve if abs(point[1] - best) <= SHOWN * best]
            for name, curve in curves.items()
        }
    x = _seconds([point for curve in curves.values() for point in curve])
    y = Scale([value for curve in curves.values() for _, value in curve], BOTTOM, TOP)
    _shade(canvas, network, x)
    canvas.left_axis(y, LEFT, RIGHT, f"test {task.metric}")
    for row, colour in _coloured(rows):
        line = [(x(seconds), y(value)) for seconds, value in curves[row["method"]]]
        canvas.line(line, _stroke(colour, row["method"]))
    canvas.bottom_axis(x, BOTTOM, "seconds of training, all overheads included")
    _legend(canvas, rows)
    return canvas.render()


def steps(rows: Sequence[Row]) -> str:
    """Return the time of a step over the time of the training, and our plans beside it."""
    network = _network(rows)
    plans = [(row, one) for row in rows if row["method"] == OURS for one in _stretches(row)]
    labels = list(dict.fromkeys(label for _, (_, _, label) in plans))
    height = BOTTOM + 50.0 + 20.0 * len(labels)
    canvas = Canvas(f"step time of {rows[0]['task']} on {network.name}", height)
    curves = {row["method"]: _times(row) for row in rows}
    x = _seconds([point for curve in curves.values() for point in curve])
    y = Scale([value for curve in curves.values() for _, value in curve], BOTTOM, TOP, log=True)
    _shade(canvas, network, x)
    canvas.left_axis(y, LEFT, RIGHT, "ms a step, logarithmic")
    for row, colour in _coloured(rows):
        line = [(x(seconds), y(value)) for seconds, value in curves[row["method"]]]
        canvas.line(line, _stroke(colour, row["method"]))
    canvas.bottom_axis(x, BOTTOM, "seconds of training")
    for _, (begun, ended, label) in plans:
        top = BOTTOM + 44.0 + 20.0 * labels.index(label)
        css = f'fill="{OWN_COLOUR}" fill-opacity="0.55"'
        canvas.rect(x(begun), top, max(x(ended) - x(begun), 1.5), 13.0, css, label)
    for number, label in enumerate(labels):
        canvas.text(RIGHT + 8.0, BOTTOM + 55.0 + 20.0 * number, label)
    _legend(canvas, rows)
    return canvas.render()


def standalone(chart: str) -> str:
    """Return an SVG element as a file of its own."""
    begun = chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return begun.replace("</title>", f"</title>{STYLE}", 1) + "\n"


def _network(rows: Sequence[Row]) -> Network:
    return NETWORKS[rows[0]["network"]].turned(rows[0]["seed"])


def _curve(row: Row) -> list[tuple[float, float]]:
    places = [row["ends"][step] for step in row["evaluated_steps"]]
    found = zip(places, smooth(row["values"]), strict=True)
    return [(place, value) for place, value in found if value is not None]


def _times(row: Row) -> list[tuple[float, float]]:
    seconds, half = step_seconds(row), AROUND // 2
    return [
        (row["ends"][i], 1e3 * statistics.median(seconds[max(0, i - half) : i + half + 1]))
        for i in range(len(seconds))
    ]


def _stretches(row: Row) -> list[tuple[float, float, str]]:
    ends = [*row["plan_seconds"][1:], row["seconds"]]
    begins = [0.0, *row["plan_seconds"][1:]]
    return list(zip(begins, ends, row["plans"], strict=True))


def _seconds(points: Sequence[tuple[float, float]]) -> Scale:
    return Scale([seconds for seconds, _ in points], LEFT, RIGHT, zero=True)


def _shade(canvas: Canvas, network: Network, x: Scale) -> None:
    """Shade every other phase of a network that changes."""
    if not network.changing:
        return
    begins = network.beginnings(x.high)
    ends = [*(begun for begun, _ in begins[1:]), x.high]
    for number, ((begun, phase), end) in enumerate(zip(begins, ends, strict=True)):
        tip = f"{phase.link.rate_mbit:g} Mbit/s, {phase.link.rtt_ms:g} ms"
        if phase.background_mbit:
            tip += f", others {phase.background_mbit:g} Mbit/s"
        fill = 'fill="#f3f0e8"' if number % 2 else 'fill="#fbfaf6"'
        canvas.rect(x(begun), TOP, x(end) - x(begun), BOTTOM - TOP, fill, tip)


def _coloured(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    others = [row for row in rows if row["method"] != OURS]
    found = [(row, COLOURS[i % len(COLOURS)]) for i, row in enumerate(others)]
    return found + [(row, OWN_COLOUR) for row in rows if row["method"] == OURS]


def _stroke(colour: str, method: str) -> str:
    width = 2.4 if method == OURS else 1.4
    return f'fill="none" stroke="{colour}" stroke-width="{width:g}"'


def _legend(canvas: Canvas, rows: Sequence[Row]) -> None:
    for number, (row, colour) in enumerate(_coloured(rows)):
        y = TOP + 8.0 + 17.0 * number
        canvas.line([(RIGHT + 8.0, y), (RIGHT + 24.0, y)], _stroke(colour, row["method"]))
        canvas.text(RIGHT + 29.0, y + 4.0, row["method"])

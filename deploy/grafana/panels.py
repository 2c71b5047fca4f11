"""Builders of the parts of a Grafana dashboard, as plain dicts in Grafana's own schema."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]

DATASOURCE = "gradpilot-prometheus"
"""Uid in provisioning/datasources/prometheus.yaml."""

WIDTH = 24
"""Columns of Grafana's grid."""

RUN = "{{run}} {{model}}"
"""Legend of one run and model."""


def target(expr: str, legend: str = RUN, *, instant: bool = False) -> Json:
    """Return one query of a panel; ``panel`` numbers it and names its data source.

    Args:
        expr: PromQL.
        legend: Name of a series, with ``{{label}}`` where a label's value goes.
        instant: Ask for the newest value only, as a table.
    """
    query: Json = {"expr": expr, "legendFormat": legend, "editorMode": "code", "range": not instant}
    return query | {"instant": True, "format": "table"} if instant else query


def panel(
    kind: str,
    title: str,
    description: str,
    targets: Iterable[Json],
    *,
    width: int,
    height: int,
    defaults: Json,
    options: Json,
    transformations: Iterable[Json] = (),
) -> Json:
    """Return a panel without id and place; ``dashboard`` gives both."""
    return {
        "type": kind,
        "title": title,
        "description": description,
        "gridPos": {"w": width, "h": height},
        "datasource": {"type": "prometheus", "uid": DATASOURCE},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": {"type": "prometheus", "uid": DATASOURCE},
                **t,
            }
            for i, t in enumerate(targets)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "transformations": list(transformations),
    }


def graph(
    title: str,
    description: str,
    *targets: Json,
    unit: str,
    width: int = 8,
    stack: bool = False,
    log: bool = False,
    bars: bool = False,
    steps: bool = False,
) -> Json:
    """Return a time series panel.

    Args:
        title: Title.
        description: What is shown and how to read it.
        targets: Queries.
        unit: Grafana's name of the unit, such as ``s``.
        width: Columns out of 24.
        stack: Draw the series on top of each other.
        log: Use a logarithmic axis.
        bars: Draw bars, for events that are counted.
        steps: Hold each value until the next, for settings.
    """
    custom: Json = {
        "drawStyle": "bars" if bars else "line",
        "lineInterpolation": "stepAfter" if steps else "linear",
        "lineWidth": 1,
        "fillOpacity": 40 if stack or bars else 0,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": "normal" if stack else "none", "group": "A"},
        "scaleDistribution": {"type": "log", "log": 10} if log else {"type": "linear"},
    }
    defaults: Json = {"unit": unit, "custom": custom}
    if not log:
        defaults["min"] = 0
    return panel(
        "timeseries",
        title,
        description,
        targets,
        width=width,
        height=8,
        defaults=defaults,
        options={
            "legend": {
                "showLegend": True,
                "displayMode": "list",
                "placement": "bottom",
                "calcs": [],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    )


def stat(
    title: str,
    description: str,
    expr: str,
    legend: str = "",
    *,
    unit: str = "none",
    width: int = 4,
    text: dict[int, str] | None = None,
    bad: int | None = None,
    good: int | None = None,
    name: bool = False,
) -> Json:
    """Return a panel with the newest value of each series.

    Args:
        title: Title.
        description: What is shown and how to read it.
        expr: PromQL.
        legend: Name of a series.
        unit: Grafana's name of the unit.
        width: Columns out of 24.
        text: Words shown instead of numbers.
        bad: From this value on it is red.
        good: From this value on it is green, and red below.
        name: Show the series' name instead of its value.
    """
    steps: list[Json] = [{"color": "text", "value": None}]
    if bad is not None:
        steps.append({"color": "red", "value": bad})
    if good is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": good}]
    words = {str(value): {"text": word} for value, word in (text or {}).items()}
    return panel(
        "stat",
        title,
        description,
        [target(expr, legend)],
        width=width,
        height=4,
        defaults={
            "unit": unit,
            "mappings": [{"type": "value", "options": words}] if words else [],
            "thresholds": {"mode": "absolute", "steps": steps},
        },
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "textMode": "name" if name else "auto",
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
        },
    )


def timeline(title: str, description: str, *targets: Json, width: int) -> Json:
    """Return a panel with one bar per series for the time in which the series exists."""
    return panel(
        "state-timeline",
        title,
        description,
        targets,
        width=width,
        height=8,
        defaults={
            "custom": {"fillOpacity": 70, "lineWidth": 0},
            "mappings": [{"type": "value", "options": {"1": {"text": "in force"}}}],
        },
        options={
            "showValue": "never",
            "rowHeight": 0.8,
            "mergeValues": True,
            "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "single", "sort": "none"},
        },
    )


def table(
    title: str, description: str, columns: dict[str, str], *, hidden: Iterable[str], width: int
) -> Json:
    """Return a table with one row per run and model, one column per query, newest values."""
    names = {f"Value #{chr(ord('A') + i)}": column for i, column in enumerate(columns)}
    return panel(
        "table",
        title,
        description,
        [target(expr, column, instant=True) for column, expr in columns.items()],
        width=width,
        height=8,
        defaults={"custom": {"align": "auto", "filterable": False}},
        options={"showHeader": True, "cellHeight": "sm"},
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": dict.fromkeys(("Time", *hidden), True),
                    "renameByName": names,
                },
            },
        ],
    )


def row(title: str) -> Json:
    """Return the head of a group of panels."""
    return {
        "type": "row",
        "title": title,
        "gridPos": {"w": WIDTH, "h": 1},
        "collapsed": False,
        "panels": [],
    }


def variable(name: str, label: str, query: str) -> Json:
    """Return a drop-down list filled from label values; several or all can be chosen."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": {"type": "prometheus", "uid": DATASOURCE},
        "definition": query,
        "query": {"query": query, "refId": f"Variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
        "skipUrlSync": False,
        "options": [],
        "regex": "",
    }


def place(panels: Iterable[Json]) -> list[Json]:
    """Return the panels numbered and laid out left to right, top to bottom."""
    placed: list[Json] = []
    x = y = line = 0
    for number, each in enumerate(panels, start=1):
        size = each["gridPos"]
        if x + size["w"] > WIDTH:
            x, y, line = 0, y + line, 0
        placed.append(each | {"id": number, "gridPos": size | {"x": x, "y": y}})
        x, line = x + size["w"], max(line, size["h"])
    return placed

"""Every PromQL expression that deploy/ ships, and what it names."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml

from tests.deploy.tools import ROOT

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "gradpilot.json"

_METRIC = re.compile(r"(?<![\w:])(gradpilot_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True)
class Query:
    """One expression.

    Attributes:
        where: File and title, for messages.
        expr: As it is written.
        legend: Labels that its legend shows.
        instant: Whether only its newest value is asked for.
    """

    where: str
    expr: str
    legend: frozenset[str] = frozenset()
    instant: bool = False

    @property
    def executable(self) -> str:
        """Return the expression with Grafana's variables replaced, for a scrape each second."""
        text = self.expr
        for variable in ("$__rate_interval", "$__interval"):
            text = text.replace(variable, "4s")
        return text.replace("$run", ".*").replace("$model", ".*")

    @property
    def metrics(self) -> dict[str, set[str]]:
        """Return the metrics named, each with the labels that matchers ask it for."""
        found: dict[str, set[str]] = {}
        for name, matchers in _METRIC.findall(self.expr):
            found.setdefault(name, set()).update(_MATCHER.findall(matchers))
        return found

    @property
    def grouped(self) -> set[str]:
        """Return the labels named in ``by (...)`` and the like."""
        lists = (part.split(",") for part in _GROUPED.findall(self.expr))
        return {label.strip() for names in lists for label in names}


def rules() -> list[dict[str, Any]]:
    """Return all recording and alert rules."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> set[str]:
    """Return the names of the recording rules."""
    return {rule["record"] for rule in rules() if "record" in rule}


def rule_queries() -> list[Query]:
    """Return the expressions of all rules."""
    return [Query(f"rules.yml: {r.get('alert') or r['record']}", r["expr"]) for r in rules()]


def dashboard_queries() -> list[Query]:
    """Return the expressions of all panels and annotations."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    found = [
        Query(
            f"dashboard: {panel['title']} {target['refId']}",
            target["expr"],
            frozenset(_LEGEND.findall(target["legendFormat"])),
            target.get("instant", False),
        )
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    for note in dashboard["annotations"]["list"]:
        shown = frozenset(_LEGEND.findall(note["textFormat"]))
        found.append(Query(f"dashboard: annotation {note['name']}", note["expr"], shown))
    return found


def variable_queries() -> list[str]:
    """Return the queries that fill the drop-down lists."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [each["query"]["query"] for each in dashboard["templating"]["list"]]

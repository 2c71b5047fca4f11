"""Metrics and labels in rules, dashboard and documents are those that the controller registers."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy import queries
from tests.deploy.tools import ROOT

FROM_PROMETHEUS = {"job", "instance"}
"""Labels that the scrape adds."""

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "examples/**/*.md", "bench/**/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.fixture(scope="module")
def registered(exposition: str) -> dict[str, set[str]]:
    """Return the labels of every series, by the name that queries use."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize(
    "query", [*queries.dashboard_queries(), *queries.rule_queries()], ids=lambda query: query.where
)
def test_query_names_what_exists(registered: dict[str, set[str]], query: queries.Query) -> None:
    labels = set(FROM_PROMETHEUS)
    for metric, asked in query.metrics.items():
        assert metric in registered
        assert asked <= registered[metric] | FROM_PROMETHEUS, metric
        labels |= registered[metric]
    assert query.grouped | query.legend <= labels


def test_alerts_use_recording_rules_that_exist() -> None:
    used = {
        name
        for query in queries.rule_queries()
        for name in re.findall(r"\b[a-z_]+:gradpilot_\w+:\w+", query.expr)
    }
    assert used <= queries.recorded()


def test_drop_down_lists_name_what_exists(registered: dict[str, set[str]]) -> None:
    for text in queries.variable_queries():
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", text).groups()  # type: ignore[union-attr]
        assert label in registered[metric]


def test_dashboard_shows_every_metric(registered: dict[str, set[str]]) -> None:
    shown = {name for query in queries.dashboard_queries() for name in query.metrics}
    families = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in registered}
    assert families - {re.sub(r"_bucket$", "", name) for name in shown} == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_names_what_exists(registered: dict[str, set[str]], path: object) -> None:
    """In documents a metric stands in backticks, perhaps with labels behind it."""
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    written = re.findall(r"`(gradpilot_[a-z_]+)(?:\{([^}`]*)\})?`", text)
    for name, labels in written:
        known = {n: ls for n, ls in registered.items() if n in (name, f"{name}_bucket")}
        assert known, f"{name} is no metric"
        asked = set(re.findall(r"[a-z_]+(?=[,=]|$)", labels))
        assert asked <= set().union(*known.values()), name


def test_labels_are_bounded(registered: dict[str, set[str]]) -> None:
    """Prometheus would rename our ``job``; ranks, steps and ids would grow without bound."""
    allowed = {"run", "model", "compressor", "collective", "outcome", "reason", "code", "le"}
    for name, labels in registered.items():
        if name != "gradpilot_build_info":
            assert labels <= allowed, name

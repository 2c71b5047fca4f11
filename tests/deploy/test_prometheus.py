"""Rules and dashboard, asked of a real Prometheus that scrapes the controller's own metrics."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from tests.conftest import require_tool
from tests.deploy import queries
from tests.deploy.tools import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
RUNBOOK = ROOT / "docs" / "runbook.md"
APT = "apt-get install prometheus"

PATIENCE_SECONDS = 30
"""How long to wait for data: a rate over 4 s needs some scrapes, a rule an evaluation."""

NEVER_TRUE_HERE = {"GradpilotControllerAbsent"}
"""Alerts on the absence of the very target that the test scrapes."""

T = TypeVar("T")

ALERTS = [rule for rule in queries.rules() if "alert" in rule]


# --- the files ---------------------------------------------------------------------------------


@pytest.mark.tools
@pytest.mark.parametrize(
    "check",
    ["check config prometheus.yml", "check rules rules.yml", "test rules rules_test.yml"],
)
def test_promtool(check: str) -> None:
    require_tool("promtool", APT)
    command = ["promtool", *check.split()]
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_has_a_unit_test() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
    fires: set[str] = set()
    silent: set[str] = set()
    computed = ""
    for test in tests:
        for case in test.get("alert_rule_test", ()):
            (fires if case.get("exp_alerts") else silent).add(case["alertname"])
        computed += "".join(case["expr"] for case in test.get("promql_expr_test", ()))
    names = {rule["alert"] for rule in ALERTS}
    # The recording rules under an alert are tested by it.
    used = computed + "".join(rule["expr"] for rule in ALERTS)
    assert fires == names
    assert silent >= names - {"GradpilotNonFiniteSteps"}  # its silence is a promql_expr_test
    assert {name for name in queries.recorded() if name not in used} == set()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+m", rule["for"])
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_runbook_has_one_section_for_each_alert() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    sections = re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert [title for title, _ in sections] == [rule["alert"] for rule in ALERTS]
    for title, body in sections:
        for part in ("**Meaning.**", "**Look at.**", "**Do.**"):
            assert part in body, f"{title} lacks {part}"


# --- a real Prometheus -------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Prometheus:
    """A client of the API of the server that the fixture starts."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: object) -> Any:
        """Return the data of an answer.

        Raises:
            AssertionError: Prometheus says that something is wrong with the question.
        """
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=5) as answer:
                read = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        assert read["status"] == "success", read
        return read["data"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def series(self, query: queries.Query) -> list[tuple[dict[str, str], list[float]]]:
        """Return labels and values of each series that answers a query, NaN left out."""
        if query.instant:
            data = self.get("/api/v1/query", query=query.executable)
        else:
            now = time.time()
            data = self.get(
                "/api/v1/query_range", query=query.executable, start=now - 2, end=now, step=1
            )
        found = []
        for each in data["result"]:
            points = each.get("values") or [each["value"]]
            values = [float(v) for _, v in points if not math.isnan(float(v))]
            if values:
                found.append((each["metric"], values))
        return found


def eventually(look: Callable[[], T], enough: Callable[[T], bool] = bool) -> T:
    """Return what a look shows, as soon as it is enough or when patience ends."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not enough(seen := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return seen


@pytest.fixture(scope="module")
def prometheus(
    exporter: int, exposition: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Start Prometheus on our own configuration, only faster and with other targets."""
    require_tool("prometheus", APT)
    folder: Path = tmp_path_factory.mktemp("prometheus")
    settings = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(PROMETHEUS / name) for name in settings["rule_files"]]
    (job,) = settings["scrape_configs"]
    # A second controller that is down, for the alert that says so.
    targets = [f"127.0.0.1:{exporter}", f"127.0.0.1:{free_port()}"]
    job["static_configs"] = [{"targets": targets}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(settings))
    client = Prometheus(port := free_port())
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 20
        while not client.is_ready():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "Prometheus is not ready after 20 s"
            time.sleep(0.05)
        yield client
    finally:
        process.terminate()
        process.wait(timeout=10)
    assert process.returncode == 0


@pytest.mark.tools
@pytest.mark.parametrize("query", queries.dashboard_queries(), ids=lambda query: query.where)
def test_dashboard_query_returns_data(prometheus: Prometheus, query: queries.Query) -> None:
    series = eventually(lambda: prometheus.series(query))
    assert series, f"no data: {query.executable}"
    for labels, _ in series:
        assert query.legend <= labels.keys(), query.executable


@pytest.mark.tools
@pytest.mark.parametrize("query", queries.rule_queries(), ids=lambda query: query.where)
def test_rule_returns_data(prometheus: Prometheus, query: queries.Query) -> None:
    if query.where.rpartition(" ")[2] in NEVER_TRUE_HERE:
        # It is, until the first scrape.
        assert not eventually(lambda: prometheus.series(query), lambda series: not series)
    else:
        assert eventually(lambda: prometheus.series(query)), f"no data: {query.executable}"


@pytest.mark.tools
def test_prometheus_evaluates_the_rules(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = prometheus.get("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def pending(rules: list[dict[str, Any]]) -> set[str]:
        return {rule["name"] for rule in rules if rule.get("state", "inactive") != "inactive"}

    expected = {rule["alert"] for rule in ALERTS} - NEVER_TRUE_HERE
    seen = eventually(rules, lambda rules: pending(rules) == expected)
    assert pending(seen) == expected
    assert {rule["health"] for rule in seen} == {"ok"}, seen


@pytest.mark.tools
def test_drop_down_lists_are_filled(prometheus: Prometheus) -> None:
    for query in queries.variable_queries():
        selector, _, label = query.removeprefix("label_values(").removesuffix(")").rpartition(", ")
        values = prometheus.get(
            f"/api/v1/label/{label}/values", **{"match[]": selector.replace("$run", ".*")}
        )
        assert values, query


@pytest.mark.tools
def test_exposition_is_well_formed(exposition: str) -> None:
    """Promtool's lint: names, units, help texts."""
    require_tool("promtool", APT)
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=exposition, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""The dashboard is what its generator writes, and nothing in it hangs in the air."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.conftest import require_tool
from tests.deploy import tools

DEPLOY = tools.ROOT / "deploy"
GRAFANA = DEPLOY / "grafana"
generator = tools.load_script(GRAFANA / "dashboard.py")

ROUND_TRIP = """
import json, sys
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models import dashboard
plugins.register_default_plugins()
read = dashboard.Dashboard.from_json(json.load(sys.stdin))
print(encoder.JSONEncoder().encode(read))
"""

NOT_IN_SDK = {
    # The SDK leaves out what is null.
    "/id",
    # Grafana's own fields of a Prometheus variable and annotation, which the SDK does not model.
    "/templating/list/0/definition",
    "/templating/list/1/definition",
    "/annotations/list/0/step",
    "/annotations/list/0/textFormat",
    "/annotations/list/0/titleFormat",
}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "gradpilot.json").read_text())
    return loaded


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf and every empty container with its path."""
    children: Any = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    if not children:
        yield path, value
    for key, child in children:
        yield from walk(child, f"{path}/{key}")


def test_committed_file_is_what_the_generator_writes() -> None:
    committed = (GRAFANA / "dashboards" / "gradpilot.json").read_text(encoding="utf-8")
    assert generator.render() == committed, "run python deploy/grafana/dashboard.py"


def test_data_source_is_the_provisioned_one(dashboard: dict[str, Any]) -> None:
    provisioned = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())
    (source,) = provisioned["datasources"]
    used = {value for path, value in walk(dashboard) if path.endswith("/datasource/uid")}
    assert used == {source["uid"]}
    assert "${DS_" not in json.dumps(dashboard)
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == scrape["scrape_interval"]


def test_another_data_source_can_be_asked_for() -> None:
    text = generator.render("mine")
    assert generator.DATASOURCE not in text
    assert text.count('"mine"') == generator.render().count(f'"{generator.DATASOURCE}"')


def test_identity_is_fixed(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None
    assert dashboard["uid"] == "gradpilot"
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["run", "model"]


def test_panels_are_told_apart_and_explained(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    for key in ("id", "title"):
        assert max(Counter(p[key] for p in panels).values()) == 1, f"a {key} is used twice"
    for panel in panels:
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        references = [t["refId"] for t in panel["targets"]]
        assert references, panel["title"]
        assert len(set(references)) == len(references), panel["title"]


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        g = panel["gridPos"]
        assert g["x"] + g["w"] <= generator.WIDTH, panel["title"]
        for x in range(g["x"], g["x"] + g["w"]):
            for y in range(g["y"], g["y"] + g["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_fits_into_a_config_map(dashboard: dict[str, Any]) -> None:
    # kubectl apply keeps a copy in an annotation, and annotations end at 256 KiB.
    assert len(generator.render().encode()) < 200 << 10


@pytest.mark.tools
@pytest.mark.timeout(300)
def test_grafanas_schema_knows_every_key(dashboard: dict[str, Any]) -> None:
    """Reading into Grafana's own types drops a mistyped key, so comparing finds it."""
    require_tool(*tools.TOOLS_VENV)
    done = subprocess.run(
        [str(tools.BIN / "python"), "-c", ROUND_TRIP],
        input=json.dumps(dashboard),
        capture_output=True,
        text=True,
        check=True,
    )
    after = dict(walk(json.loads(done.stdout)))
    changed = {path for path, value in walk(dashboard) if after.get(path, "lost") != value}
    assert changed == NOT_IN_SDK

"""Containers, Kubernetes and systemd: what their own tools say of our files."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import gradpilot
from gradpilot.controller import config
from tests.conftest import require_tool
from tests.deploy import tools

DEPLOY = tools.ROOT / "deploy"
MONITORING = DEPLOY / "kubernetes" / "monitoring"
SYSTEMD = DEPLOY / "systemd"
VERSION = gradpilot.__version__

READ_CUSTOM_RESOURCES = """
import json, sys
from cloudcoil.models.prometheus_operator import v1
read = [getattr(v1, given["kind"]).model_validate(given) for given in json.load(sys.stdin)]
print(json.dumps([r.model_dump(mode="json", by_alias=True, exclude_none=True) for r in read]))
"""

Json = dict[str, Any]


def output(*command: str | Path, stdin: str | None = None) -> str:
    """Run a program that must succeed; return what it wrote."""
    done = subprocess.run(
        [str(part) for part in command],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{command[0]} failed: {done.stdout}"
    return done.stdout


@pytest.fixture
def tool_bin() -> Path:
    require_tool(*tools.TOOLS_VENV)
    return tools.BIN


# --- containers --------------------------------------------------------------------------------


def image_environ() -> dict[str, str]:
    """Return the variables that the Dockerfile sets for the controller."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    pairs = (pair.split("=", 1) for pair in shlex.split(line))
    return {name: value for name, value in pairs if name.startswith(config.ENV_PREFIX)}


def test_image_settings_are_accepted() -> None:
    settings = config.load([], image_environ())
    assert config.split_address(settings.grpc_address) == ("0.0.0.0", config.GRPC_PORT)
    assert config.split_address(settings.http_address) == ("0.0.0.0", config.HTTP_PORT)
    assert settings.state == "/var/lib/gradpilot/controller.sqlite3"


def test_image_holds_all_code_folders() -> None:
    copied = re.findall(r"^COPY (\w+) \1$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    links = [p.name for p in (tools.ROOT / "gradpilot").iterdir() if p.is_symlink()]
    assert sorted(copied) == sorted(["gradpilot", *links])
    kept = re.findall(r"^!(\w+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(copied) < set(kept)


@pytest.mark.tools
@pytest.mark.timeout(300)
def test_dockerfile(tool_bin: Path) -> None:
    assert output(tool_bin / "hadolint", DEPLOY / "Dockerfile") == ""


@pytest.mark.tools
@pytest.mark.timeout(300)
def test_compose_file(tool_bin: Path) -> None:
    """Compose reads it, all names resolve, what it mounts is there, and loopback is the default."""
    file = DEPLOY / "compose.yaml"
    output(tool_bin / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", file)
    read = yaml.safe_load(output(tool_bin / "docker-compose", "-f", file, "config"))
    services: Json = read["services"]
    assert set(services) == {"controller", "prometheus", "grafana"}
    assert services["controller"]["image"].endswith(f":{VERSION}")
    for service in services.values():
        for mount in service.get("volumes", []):
            if mount["type"] == "bind":
                assert Path(mount["source"]).exists(), mount["source"]
        assert {port["host_ip"] for port in service["ports"]} == {"127.0.0.1"}


def test_compose_gives_grafana_what_provisioning_names() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    inside = [mount.split(":")[1] for mount in compose["grafana"]["volumes"]]
    provisioning = DEPLOY / "grafana" / "provisioning" / "dashboards" / "gradpilot.yaml"
    (provider,) = yaml.safe_load(provisioning.read_text())["providers"]
    assert provider["options"]["path"] in inside
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"controller:{config.HTTP_PORT}"]}]


# --- Kubernetes --------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "monitoring"])
def manifests(request: pytest.FixtureRequest, tool_bin: Path, tmp_path: Path) -> dict[str, Json]:
    """Return what kubectl would apply, by kind and name, also with the component switched on."""
    for folder in ("kubernetes", "grafana"):
        shutil.copytree(DEPLOY / folder, tmp_path / folder)
    expected_unknown = set()
    if request.param == "monitoring":
        file = tmp_path / "kubernetes" / "kustomization.yaml"
        switched = re.sub(r"^# (components:)\n# ( .*)$", r"\1\n\2", file.read_text(), flags=re.M)
        assert "\ncomponents:\n  - monitoring\n" in switched
        file.write_text(switched)
        expected_unknown = {"PodMonitor", "PrometheusRule"}
    text = output(tool_bin / "kubectl", "kustomize", tmp_path / "kubernetes")
    (tmp_path / "all.yaml").write_text(text)
    said = output(tool_bin / "kubernetes-validate", "--strict", tmp_path / "all.yaml")
    assert set(re.findall(r"find schema for kind (\w+)", said)) == expected_unknown
    return {f"{m['kind']}/{m['metadata']['name']}": m for m in yaml.safe_load_all(text)}


@pytest.mark.tools
@pytest.mark.timeout(300)
def test_kubernetes_manifests(manifests: dict[str, Json], tmp_path: Path) -> None:
    deployment = manifests["Deployment/gradpilot-controller"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"gradpilot-controller:{VERSION}"
    assert labels["app.kubernetes.io/version"] == VERSION
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": config.GRPC_PORT, "http": config.HTTP_PORT}

    # The controller accepts its file, and the state lies on the volume and has one owner at a time.
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"] == ["--config", f"{mounts['config']}/controller.toml"]
    file = tmp_path / "controller.toml"
    file.write_text(manifests["ConfigMap/gradpilot-controller"]["data"]["controller.toml"])
    settings = config.load(["--config", str(file)], image_environ())
    assert str(Path(settings.state).parent) == mounts["state"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    assert pod["terminationGracePeriodSeconds"] > settings.drain_seconds

    # Whatever selects pods selects these, by labels that do not change with the version.
    policy = manifests["NetworkPolicy/gradpilot-controller"]["spec"]
    selectors = [
        deployment["selector"]["matchLabels"],
        manifests["Service/gradpilot-controller"]["spec"]["selector"],
        policy["podSelector"]["matchLabels"],
    ]
    if monitor := manifests.get("PodMonitor/gradpilot-controller"):
        selectors.append(monitor["spec"]["selector"]["matchLabels"])
        assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
        # Rules and dashboard ask for job="gradpilot".
        assert labels[monitor["spec"]["jobLabel"]] == "gradpilot"
        dashboard = manifests["ConfigMap/gradpilot-dashboard"]
        assert json.loads(dashboard["data"]["gradpilot.json"])["uid"] == "gradpilot"
    for selector in selectors:
        assert selector
        assert selector.items() <= labels.items()
        assert "app.kubernetes.io/version" not in selector
    agents = policy["ingress"][0]["from"][0]["podSelector"]
    assert agents == {"matchLabels": {"gradpilot.io/agent": "true"}}


def test_prometheus_rule_repeats_the_rule_file() -> None:
    script = tools.load_script(MONITORING / "prometheusrule.py")
    committed = (MONITORING / "prometheusrule.yaml").read_text(encoding="utf-8")
    assert script.render() == committed, f"run python {script.__file__}"
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    assert yaml.safe_load(committed)["spec"] == rules


@pytest.mark.tools
@pytest.mark.timeout(300)
def test_operators_schema_knows_every_key(tool_bin: Path) -> None:
    """Reading into the operator's own types drops a mistyped key, so comparing finds it."""
    files = [MONITORING / "podmonitor.yaml", MONITORING / "prometheusrule.yaml"]
    given = [yaml.safe_load(file.read_text()) for file in files]
    read = output(tool_bin / "python", "-c", READ_CUSTOM_RESOURCES, stdin=json.dumps(given))
    assert json.loads(read) == given


# --- systemd -----------------------------------------------------------------------------------


@pytest.mark.tools
def test_systemd_unit(tmp_path: Path) -> None:
    require_tool("systemd-analyze", "apt-get install systemd")
    text = (SYSTEMD / "gradpilot-controller.service").read_text()
    program = "ExecStart=/opt/gradpilot/bin/gradpilot "
    assert text.count(program) == 1
    unit = tmp_path / "gradpilot-controller.service"
    unit.write_text(text.replace(program, "ExecStart=/bin/true "))  # it must exist to be checked
    assert output("systemd-analyze", "verify", unit) == ""
    # 0 .. 10, less is better; the unhardened unit has 9.6.
    output("systemd-analyze", "security", "--offline=true", "--threshold=20", unit)


def test_systemd_units_command_and_file_are_accepted() -> None:
    text = (SYSTEMD / "gradpilot-controller.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+ controller (.*)$", text, re.MULTILINE)
    installed = "/etc/gradpilot/controller.toml"
    file = str(SYSTEMD / "controller.toml")
    settings = config.load(command.replace(installed, file).split(), {})
    defaults = config.load([], {})
    assert settings.log_format == "json"
    # What the file says of addresses is what holds without it.
    assert settings.grpc_address == defaults.grpc_address
    assert settings.http_address == defaults.http_address
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop) > settings.drain_seconds
    environment = {"STATE_DIRECTORY": "/var/lib/gradpilot"}
    assert config.state_path(settings, environment) == "/var/lib/gradpilot/controller.sqlite3"

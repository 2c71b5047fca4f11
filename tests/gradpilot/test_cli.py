"""The command line against a real controller with two fake agents."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import pytest

import gradpilot
from gradpilot import cli
from gradpilot.protos.messages import Ack, Hello, Plan
from gradpilot.worker_agent import embedded
from gradpilot.worker_agent.client import ControllerClient
from gradpilot.worker_agent.config import AgentConfig
from tests.controller import fakes

LAYOUT = fakes.layout()
RANKS = 2


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A controller that has decided once for a run of two ranks."""
    config = AgentConfig()
    child = embedded.start(config)
    assert child is not None
    plans: list[Plan] = []
    clients = []
    for rank in range(RANKS):

        def hello(rank: int = rank) -> Hello:
            return fakes.hello(rank, RANKS)

        client = ControllerClient(child.grpc_address, hello, config, world_size=RANKS)
        client.set_catalog(fakes.catalog(LAYOUT))
        client.start(on_plan=plans.append)
        clients.append(client)
    deadline = time.monotonic() + 30
    sequence = 0
    try:
        while not plans and time.monotonic() < deadline:
            sequence += 1
            for rank, client in enumerate(clients):
                client.send_report(fakes.report(LAYOUT, rank, sequence, world_size=RANKS))
            time.sleep(0.2)
        assert plans, "the controller was expected to decide"
        for client in clients:
            client.send_ack(Ack(plans[0].term, plans[0].id, "agreed", 10 * sequence))
        yield child.grpc_address
    finally:
        for client in clients:
            client.close()
        child.stop()


def _run(capsys: pytest.CaptureFixture[str], address: str, *words: str) -> str:
    command, *rest = words
    assert cli.main([command, "--address", address, *rest]) == 0
    return capsys.readouterr().out


def test_health_is_told_by_word_and_exit_code(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(capsys, address, "health") == "serving\n"
    assert json.loads(_run(capsys, address, "health", "--output", "json")) == {"serving": True}
    assert cli.main(["health", "--address", "127.0.0.1:9"]) == 1


def test_runs_are_listed(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    header, row = _run(capsys, address, "runs").splitlines()
    assert header.split()[:3] == ["RUN", "MODEL", "STATE"]
    assert row.split()[:2] == ["run", "model"]
    (run,) = json.loads(_run(capsys, address, "runs", "--output", "json"))
    assert (run["run"], run["ranks"], run["world_size"]) == ("run", RANKS, RANKS)


def test_one_run_is_shown_with_its_layout(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _run(capsys, address, "run", "run")
    assert f"{len(LAYOUT.buckets)} buckets" in text
    assert "decision" in text
    detail = json.loads(_run(capsys, address, "run", "run", "--output", "json"))
    assert detail["layout"]["digest"] == LAYOUT.digest


def test_a_decision_is_explained(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    decision = json.loads(_run(capsys, address, "explain", "run", "--output", "json"))
    text = _run(capsys, address, "explain", "run", "--decision", str(decision["id"]))
    assert all(part in text for part in decision["reason"].split(". "))
    assert f"front: {len(decision['front'])} points" in text
    assert len(decision["front"]) >= 1
    assert decision["explanation"]["seen"]["ranks"] == RANKS
    assert decision["explanation"]["best"]
    assert decision["since"]["id"] <= decision["id"]
    for title in ("measured:", "predicted (", "why:", "since then:", "advice on DDP"):
        assert title in text
    assert decision["inputs_json"]


def test_orders_are_carried_out(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run(capsys, address, "pin", "run", "topk", "ratio=0.01", "collective=allgather")
    (run,) = json.loads(_run(capsys, address, "runs", "--output", "json"))
    assert "topk" in run["pinned"]
    _run(capsys, address, "unpin", "run")
    _run(capsys, address, "freeze", "run")
    (run,) = json.loads(_run(capsys, address, "runs", "--output", "json"))
    assert (run["pinned"], run["frozen"]) == ("", True)
    _run(capsys, address, "resume", "run")
    (run,) = json.loads(_run(capsys, address, "runs", "--output", "json"))
    assert run["frozen"] is False


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["run", "nobody"], 1, "nobody"),
        (["explain", "run", "--decision", "987654"], 1, "987654"),
        (["pin", "run", "topk", "ratio=7"], 2, "ratio"),
        (["pin", "run", "tpok", "collective=allgather"], 1, "tpok"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    address: str, capsys: pytest.CaptureFixture[str], words: list[str], code: int, text: str
) -> None:
    assert cli.main([words[0], "--address", address, *words[1:]]) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert text in error


def test_a_controller_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "--address", "127.0.0.1:9"]) == 1
    assert "no controller answers at 127.0.0.1:9" in capsys.readouterr().err


def test_policies_need_no_controller(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["policies", "--output", "json"]) == 0
    policies = json.loads(capsys.readouterr().out)
    ours = {"adaptive", "fixed"}
    published = {"accordion", "flexible", "gravac", "kimad", "lgreco"}
    assert ours | published <= {policy["name"] for policy in policies}
    assert cli.main(["policies"]) == 0
    text = capsys.readouterr().out
    for policy in policies:
        assert set(policy) == {"name", "summary", "source", "grain", "uses"}
        assert f"{policy['name']:12} {policy['summary']}\n" in text
        assert f"  {policy['grain']}; {policy['source']}\n" in text
        assert all(used in text for used in policy["uses"])
        assert policy["uses"] or policy["name"] == "fixed"
        if policy["name"] in published:
            assert "20" in policy["source"]  # a paper has a year


def test_version_needs_no_controller(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"gradpilot {gradpilot.__version__}\n"


@pytest.mark.parametrize(
    ("command", "some"),
    [("compressors", {"none", "topk", "powersgd"}), ("collectives", {"native", "ring"})],
)
def test_what_is_registered_is_listed_without_a_controller(
    capsys: pytest.CaptureFixture[str], command: str, some: set[str]
) -> None:
    assert cli.main([command, "--output", "json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert some <= {entry["name"] for entry in entries}
    assert cli.main([command]) == 0
    text = capsys.readouterr().out
    for entry in entries:
        assert entry["summary"] in text
        for setting in entry.get("settings", ()):
            assert f"{setting['name']}={setting['default']}: {setting['text']}" in text


def test_a_listing_without_torch_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("gradpilot.worker_agent.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("gradpilot.worker_agent.listing", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["compressors"]) == 1
    assert capsys.readouterr().err.endswith("pip install 'gradpilot[torch]'\n")


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["nonsense"], ["explain"], ["controller", "--no-such-flag"]):
        try:
            code: object = cli.main(words)
        except SystemExit as stop:
            code = stop.code
        assert code == 2, words
        assert capsys.readouterr().err

"""A rank is a process of the user's: what else is in it, and around it, must go on working.

Of this, tested elsewhere: forks by hand and proxies on loopback in
``tests/worker_agent/test_client.py``, ends of a process in ``tests/end_to_end/test_clean_exit.py``,
protobuf 5 to 7 in ``tests/protos/test_generated.py``.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gradpilot.worker_agent.__main__ import _run_script
from tests.conftest import require_tool
from tests.project import ROOT
from tests.torchrun import WRAPPER, Ended, inside, torchrun
from tests.worker_agent.training import OPTIONS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

FOLDER = Path(__file__).parent

DEAD = "http://127.0.0.1:9"
"""Where nobody answers: the port of the discard service."""

HOSTILE = {
    **dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"), DEAD),
    "PYTHONPATH": str(ROOT),
}

LOOPBACK = "ip link set lo up; "
WITHOUT_IPV6 = f"{LOOPBACK} echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; "
PRIVATE = ("10.1.2.3/8", "172.16.5.6/12", "192.168.7.8/16", "fd00::9/64")
WITH_PRIVATE = LOOPBACK + "".join(
    f"ip address add {address} dev lo {'nodad' if ':' in address else ''}; " for address in PRIVATE
)


@functools.cache
def networks() -> bool:
    """Return whether a network of its own can be made here, with IPv6 and without."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    tries = (inside(network) for network in (WITHOUT_IPV6, WITH_PRIVATE))
    return all(not subprocess.run([*one, "true"], capture_output=True).returncode for one in tries)


def require_networks() -> None:
    require_tool(networks, "root, iproute2, util-linux, and a kernel with IPv6 and namespaces")


def reach(network: str, bind: str, *hosts: str) -> dict[str, Any]:
    """Return who reached a controller that was told to listen there."""
    program = [sys.executable, "-m", "tests.training.hostile_network", bind, *hosts]
    done = subprocess.run(
        [*inside(network), *program],
        cwd=ROOT,
        env={**os.environ, **HOSTILE, "GRPC_ENABLE_FORK_SUPPORT": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_proxies_do_not_get_between_an_agent_and_a_private_address() -> None:
    require_networks()
    hosts = ["127.0.0.1", "localhost", "[::1]"]
    hosts += [f"[{ip}]" if ":" in ip else ip for ip in (p.partition("/")[0] for p in PRIVATE)]
    found = reach(WITH_PRIVATE, "[::]:0", *hosts)
    assert found["agents"] == found["operators"] == [True] * len(hosts)
    assert found["careless"] is False, "these proxies are in the way of whoever heeds them"


def test_hosts_without_ipv6() -> None:
    """Both families at once are what a container image may be told to listen on."""
    require_networks()
    found = reach(WITHOUT_IPV6, "[::]:0", "localhost", "127.0.0.1")
    assert found["agents"] == found["operators"] == [True, True]
    found = reach(WITHOUT_IPV6, "[::1]:0")
    assert found["code"] == 1
    (line,) = found["said"]
    assert "cannot listen on grpc_address [::1]:0" in line
    assert "this machine has no such address" in line


# --- one job with all of it ----------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What became of the hostile job, and what its ranks saw."""

    ended: Ended
    ranks: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Run it once, without IPv6 where that can be had."""
    folder = tmp_path_factory.mktemp("hostile")
    ended = torchrun(
        folder,
        *(*WRAPPER, str(FOLDER / "hostile_job.py"), str(folder)),
        ranks=2,
        timeout=60,
        network=WITHOUT_IPV6 if networks() else "",
        TORCH_DISTRIBUTED_DEBUG="INFO",
        GRADPILOT_OPTION="topk ratio=0.1 collective=allgather",
        GRADPILOT_REPORT_SECONDS="0.2",
        **HOSTILE,
    )
    assert ended.code == 0, ended.err
    results = [folder / f"result{rank}.json" for rank in range(2)]
    return Job(ended, [json.loads(result.read_text()) for result in results], folder)


def test_three_epochs_of_forked_workers_beside_a_live_session(job: Job) -> None:
    for found in job.ranks:
        first, *others = found["workers"]
        assert len(first) == 2
        assert others == [first, first], "the workers persist"
        assert found["sessions"] == [True, 1], "the session is the one from before the forks"
        assert found["dropped"] == 0
        assert found["steps"] > 3 * 16
        assert found["seconds"] < 20
        assert found["option"] == "topk", "its plan came while workers were alive"
    assert "fork" not in job.ended.err
    assert job.ended.left == ()


def test_the_embedded_controller_is_reached_whatever_proxies_are_set(job: Job) -> None:
    for found in job.ranks:
        assert found["hosts"] == ["127.0.0.1", DEAD]


def test_torchs_checks_of_every_collective_find_nothing(job: Job) -> None:
    """``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps the groups that are made from then on."""
    assert {option.collective for option in OPTIONS if not option.skip} >= {"allgather", "ring"}
    for found in job.ranks:
        assert found["debug"] == ["INFO", "DETAIL"]
        assert found["equal"]
        assert found["frozen"] == ["", ""]


def test_a_script_is_what_it_would_be_without_the_wrapper(job: Job) -> None:
    for found in job.ranks:
        assert set(found["annotations"].values()) == {True}, found["annotations"]
    assert job.ranks[0]["spawned"] == "Settings 7 False"
    for rank in range(2):
        assert (job.folder / f"exit{rank}").read_text() == "True"


def test_a_model_that_the_script_attaches_is_left_to_it(job: Job) -> None:
    assert "stays plain DDP" not in job.ended.err


def test_only_a_script_that_says_so_postpones_its_annotations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "script.py"
    body = "def f(bucket: int) -> str: ...\nfound = f.__annotations__\n"
    for first, expected in (
        ("", {"bucket": int, "return": str}),
        ("from __future__ import annotations\n", {"bucket": "int", "return": "str"}),
    ):
        script.write_text(first + body)
        _run_script(str(script))
        assert vars(sys.modules["__main__"])["found"] == expected

"""The project itself: layout, plug-ins and their tests, pins, and what no file may hold."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from gradpilot.policies.base import POLICIES
from gradpilot.registry import Registry
from gradpilot.worker_agent.collectives.base import SCHEDULES
from gradpilot.worker_agent.compressors.base import COMPRESSORS
from tests.project import LINKS, PROJECT, ROOT, project_files, require_clone

MOST_LINES = 450
MOST_LINES_OF_TESTS = 800
"""Test files are lists of cases that need not be read together."""

LONGER = {
    "worker_agent/testing.py": 560,  # what every compressor must fulfil, in one place
    "worker_agent/hook.py": 500,  # the way of a bucket, which has to be read as a whole
}
"""Files that may be longer, and how long."""

TESTED_ELSEWHERE = {
    # Plain values and interfaces: tested by whoever uses them.
    "controller/errors.py": "tests/controller/test_servicer.py",
    "gradpilot/errors.py": "tests/protos/test_codec.py",
    "policies/base.py": "tests/policies/test_adaptive.py",
    "policies/evaluation.py": "tests/policies/test_choice.py",
    "protos/explanations.py": "tests/controller/test_aftermath.py",
    "protos/messages.py": "tests/protos/test_validate.py",
    "protos/messages_catalog.py": "tests/protos/test_validate.py",
    "protos/messages_options.py": "tests/protos/test_validate.py",
    "protos/messages_reports.py": "tests/protos/test_validate.py",
    "protos/reflection.py": "tests/protos/test_codec.py",
    "worker_agent/collectives/base.py": "tests/worker_agent/test_wire.py",
    "worker_agent/compressors/base.py": "tests/worker_agent/compressors/test_topk.py",
    "worker_agent/compressors/settings.py": "tests/worker_agent/compressors/test_topk.py",
    # Parts of one mechanism that is tested as a whole.
    "controller/layouts.py": "tests/controller/test_run.py",
    "controller/member.py": "tests/controller/test_run.py",
    "controller/operators.py": "tests/controller/test_servicer.py",
    "controller/runs.py": "tests/controller/test_run.py",
    "controller/sessions.py": "tests/controller/test_servicer.py",
    "controller/views.py": "tests/controller/test_servicer.py",
    "gradpilot/operate.py": "tests/gradpilot/test_cli.py",
    "policies/change.py": "tests/policies/test_link.py",
    "policies/history.py": "tests/policies/test_learning.py",
    "policies/nsga.py": "tests/policies/test_solver.py",
    "policies/options.py": "tests/policies/test_problem.py",
    "bench/_baselines.py": "tests/bench/test_compressors.py",
    "bench/_compressor_jobs.py": "tests/bench/test_compressors.py",
    "bench/_gradients.py": "tests/bench/test_compressors.py",
    "bench/_memory.py": "tests/bench/test_compressors.py",
    "bench/_recorded_tasks.py": "tests/bench/test_record_gradients.py",
    "bench/_processes.py": "tests/bench/test_network_model.py",
    "bench/_rounds.py": "tests/bench/test_compressors.py",
    "bench/_verdicts.py": "tests/bench/test_compressors.py",
    "worker_agent/compressors/_agreed.py": "tests/worker_agent/compressors/test_randomk.py",
    "worker_agent/compressors/_blockwise.py": "tests/worker_agent/compressors/test_int8.py",
    "worker_agent/compressors/_chunks.py": "tests/worker_agent/compressors/test_topkc.py",
    "worker_agent/compressors/_low_rank.py": "tests/worker_agent/compressors/test_powersgd.py",
    "worker_agent/compressors/_precision.py": "tests/worker_agent/compressors/test_bits.py",
    "worker_agent/compressors/_rotated_codes.py": "tests/worker_agent/compressors/test_thc.py",
    "worker_agent/testing_collectives.py": "tests/worker_agent/collectives/test_ring.py",
    "worker_agent/testing_tools.py": "tests/worker_agent/compressors/test_topk.py",
    "worker_agent/compressors/_sixteen_bit.py": "tests/worker_agent/compressors/test_fp16.py",
    "worker_agent/collectives/gather.py": "tests/worker_agent/test_wire.py",
    "worker_agent/collectives/reduction.py": "tests/worker_agent/test_wire.py",
    "worker_agent/collectives/skipping.py": "tests/worker_agent/collectives/test_ring.py",
    "worker_agent/compatibility.py": "tests/training/test_refused.py",
    "worker_agent/distributed_checkpoint.py": "tests/training/test_checkpoints.py",
    "worker_agent/hook_state.py": "tests/training/test_standard_form.py",
    "worker_agent/unused.py": "tests/training/test_ddp_modes.py",
    "worker_agent/controller_link.py": "tests/worker_agent/test_agent.py",
    "worker_agent/division.py": "tests/worker_agent/test_hook.py",
    "worker_agent/handle.py": "tests/worker_agent/test_agent.py",
    "worker_agent/managing.py": "tests/examples/test_frameworks.py",
    "worker_agent/meeting.py": "tests/worker_agent/test_agent.py",
    "worker_agent/peers.py": "tests/worker_agent/test_wire.py",
    "worker_agent/testing.py": "tests/worker_agent/compressors/test_topk.py",
    # Programs and their ends, which need processes of their own.
    "bench/overhead.py": "tests/bench/test_results_file.py",
    "controller/__main__.py": "tests/end_to_end/test_controller_loss.py",
    "worker_agent/__main__.py": "tests/end_to_end/test_clean_exit.py",
    "worker_agent/teardown.py": "tests/end_to_end/test_clean_exit.py",
}
"""Modules without a test file of their own, and the one that tests them."""

WHOLE = {
    "gradpilot/demo/": "tests/demo",
    "gradpilot/simulate/": "tests/simulate",
    "gradpilot/auto/": "tests/examples",
    "gradpilot/integrations/": "tests/examples",
    "bench/chaos/": "tests/bench",
    "bench/claims/": "tests/bench",
    "bench/efficiency_runs/": "tests/bench",
    "bench/modes/": "tests/bench",
    "bench/netlab/": "tests/bench",
    "bench/network_model/": "tests/bench",
    "bench/report/": "tests/bench",
    "bench/skip/": "tests/bench",
    "worker_agent/sharded/": "tests/worker_agent/sharded",
    "bench/tta/": "tests/bench",
}
"""Programs whose parts serve nothing else: tested as a whole, in that folder."""

FORBIDDEN = {
    "a path of somebody's machine": r"/wor[k]/|/hom[e]/\w|/Use[r]s/|\.\./share[d]\b",
    "a host of a package registry": r"pyp[i]\.org|pythonhost[e]d\.org|download\.pytorc[h]\.org"
    r"|registry\.npmj[s]\.org|deb\.debia[n]\.org",
    "a note to come back": r"\b(TOD[O]|FIXM[E]|XX[X])\b",
    "a conflict": r"^(<{7}|>{7}) ",
}
"""What no file may hold; brackets keep the patterns from finding themselves."""


def sources() -> list[str]:
    """Return our own modules, relative to the root."""
    folders = (*LINKS, "gradpilot", "bench")
    return [
        name
        for name in (path.relative_to(ROOT).as_posix() for path in project_files())
        if name.startswith(tuple(f"{folder}/" for folder in folders))
        and name.endswith(".py")
        and not name.endswith("/__init__.py")
        and "_pb2" not in name
    ]


def test_the_package_is_links_to_the_root_folders() -> None:
    """A checkout without links would build an empty wheel without a word."""
    for name in LINKS:
        link = ROOT / "gradpilot" / name
        assert link.is_symlink(), f"{link} is no link: git config core.symlinks true"
        assert os.readlink(link) == f"../{name}"
    require_clone()
    staged = subprocess.run(
        ["git", "ls-files", "--stage", "gradpilot"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    committed = {row.split("\t")[1] for row in staged.splitlines() if row.startswith("120000")}
    assert committed == {f"gradpilot/{name}" for name in LINKS}


@pytest.mark.parametrize(
    ("registry", "folder"),
    [
        (COMPRESSORS, "worker_agent/compressors"),
        (SCHEDULES, "worker_agent/collectives"),
        (POLICIES, "policies"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_every_plug_in_is_one_file_with_one_test_file(registry: Registry[Any], folder: str) -> None:
    names = registry.names()
    assert names
    for name in names:
        assert (ROOT / folder / f"{name}.py").is_file()
        assert (ROOT / "tests" / folder / f"test_{name}.py").is_file()


def mirrored(source: str) -> str:
    """Return the test file of a module: ``a/b.py`` is tested by ``tests/a/test_b.py``."""
    path = Path(source)
    return str(Path("tests") / path.parent / f"test_{path.name.lstrip('_')}")


def test_every_module_has_its_test_file() -> None:
    missing = [
        source
        for source in sources()
        if source not in TESTED_ELSEWHERE
        and not source.startswith(tuple(WHOLE))
        and not (ROOT / mirrored(source)).is_file()
    ]
    assert missing == []
    for folder in WHOLE.values():
        assert list((ROOT / folder).glob("test_*.py"))


def test_exceptions_from_that_are_few_and_name_what_exists() -> None:
    assert set(TESTED_ELSEWHERE) <= set(sources())
    for module, test in TESTED_ELSEWHERE.items():
        assert (ROOT / test).is_file(), module
    assert len(TESTED_ELSEWHERE) < 0.3 * len(sources())


def test_files_are_short() -> None:
    long = {}
    for path in project_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in (".py", ".sh", ".proto") or "_pb2" in path.name:
            continue
        most = MOST_LINES_OF_TESTS if name.startswith("tests/") else LONGER.get(name, MOST_LINES)
        lines = path.read_text().count("\n")
        if lines > most:
            long[name] = lines
    assert long == {}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}: {hit.group()}"
        for path in project_files()
        if (hit := pattern.search(path.read_text(errors="replace")))
    ]
    assert found == []


def test_layers_are_contracts() -> None:
    """``make lint`` runs them; here, that none of the four is dropped or emptied."""
    contracts = {
        tuple(contract["source_modules"]): set(contract["forbidden_modules"])
        for contract in PROJECT["tool"]["importlinter"]["contracts"]
    }
    package = "gradpilot."
    required = {
        "worker_agent": {"gradpilot.policies", "gradpilot.controller", "pymoo", "pydantic"},
        "controller": {"gradpilot.worker_agent", "torch"},
        "policies": {"gradpilot.worker_agent", "gradpilot.controller", "torch", "grpc"},
        "protos": {f"{package}{name}" for name in LINKS if name != "protos"} | {"torch"},
    }
    for layer, forbidden in required.items():
        assert forbidden <= contracts[(package + layer,)], layer


def pins() -> dict[str, str]:
    """Return the version of every package that requirements/ pins, by normalised name."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            text = line.partition("#")[0].strip()
            if not text:
                continue
            name, equals, version = text.partition("==")
            assert equals, f"{path.name}: expected NAME==VERSION, got {line!r}"
            assert normalised(name) not in found, f"{path.name}: {name} is pinned twice"
            found[normalised(name)] = version
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def test_pins_are_exact_and_within_what_the_package_accepts() -> None:
    pinned = pins()
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(text for texts in extras.values() for text in texts)]
    for requirement in map(Requirement, asked):
        if requirement.name != "gradpilot":
            version = pinned[normalised(requirement.name)]
            assert requirement.specifier.contains(version), f"{requirement} and pin {version}"


def test_ci_runs_what_the_documents_say() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and line[0] != "#"]
    assert commands[-1] == "GRADPILOT_REQUIRE_ALL=1 exec make test"
    assert "make lint" in commands
    assert "GRADPILOT_REQUIRE_ALL=1 make bench-quick BENCH_ARGS=--small" in commands
    assert "set -euo pipefail" in commands


def test_tests_are_no_packages() -> None:
    """Two test files of one name may live in two folders only without ``__init__.py``."""
    assert [
        p for p in project_files() if p.is_relative_to(ROOT / "tests") and p.stem == "__init__"
    ] == []

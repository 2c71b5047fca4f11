"""What is installed: the wheel's files, what imports load, and the public names."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import gradpilot
from tests.project import LINKS, ROOT, project_files

SHIPPED = {".py", ".pyi", ".proto", ".typed", ".json"}
"""Suffixes of files that belong into the wheel."""

PUBLIC = ["Handle", "attach", "HookState", "hook", "Sharding", "__version__"]
"""Adding a name is a promise, removing one breaks users: change it on purpose only."""

HANDLE = {
    *("run", "model", "rank", "world_size", "controller", "metrics_url"),
    *("plan", "step", "layout", "frozen", "counters"),
    *("observe", "state_dict", "rank_state", "load_state_dict", "detach", "close"),
}

ATTACH = [
    "model",
    "controller",
    "run",
    "name",
    "policy",
    "seed",
    "start",
    "wire",
    "grad_scaler",
    "sharding",
    "settings",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel built from a copy, since setuptools writes beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    for path in project_files():
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    for name in LINKS:
        (copy / "gradpilot" / name).symlink_to(f"../{name}")
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    done = subprocess.run(
        [sys.executable, "-m", *build, str(folder), str(copy)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    expected = set()
    for path in project_files():
        inside = path.relative_to(ROOT)
        if path.suffix in SHIPPED and inside.parts[0] in (*LINKS, "gradpilot"):
            own = inside.parts[0] == "gradpilot"
            expected.add(inside.as_posix() if own else f"gradpilot/{inside.as_posix()}")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected
    for name in ("py.typed", "protos/v1/types.proto", "worker_agent/compressors/topk.py"):
        assert f"gradpilot/{name}" in names


def test_the_agent_asks_for_two_packages_and_the_version_is_one(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
        licences = [n for n in archive.namelist() if n.endswith("/LICENSE")]
    required = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert sorted(text.partition("<")[0] for text in required) == ["grpcio", "protobuf"]
    assert metadata["Version"] == gradpilot.__version__
    assert len(licences) == 1


def test_the_wheel_works_beside_folders_of_the_same_names(wheel: Path, tmp_path: Path) -> None:
    """A user's own ``policies/`` next to the training script must not meet ours."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    for name in LINKS:
        (tmp_path / "user" / name).mkdir(parents=True)
        (tmp_path / "user" / name / "__init__.py").write_text("raise AssertionError('not this')")
    out = python(
        "import gradpilot\n"
        "from gradpilot.policies.base import POLICIES\n"
        "from gradpilot.worker_agent.compressors.base import COMPRESSORS\n"
        "print(gradpilot.__file__, *POLICIES, *COMPRESSORS)",
        cwd=tmp_path / "user",
        PYTHONPATH=str(tmp_path / "installed"),
    )
    where, *names = out.split()
    assert Path(where).is_relative_to(tmp_path / "installed")
    assert {"adaptive", "fixed", "none", "topk"} <= set(names)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gradpilot", ("torch", "grpc", "numpy", "pydantic")),
        ("gradpilot.cli", ("torch", "grpc", "pymoo")),
        ("gradpilot.controller.server", ("torch", "gradpilot.worker_agent")),
        ("gradpilot.policies.adaptive", ("torch", "grpc", "pydantic")),
        (
            "gradpilot.worker_agent.agent",
            (
                *("pymoo", "pydantic", "sqlalchemy", "prometheus_client", "starlette"),
                *("gradpilot.policies", "gradpilot.controller"),
            ),
        ),
    ],
)
def test_an_import_loads_no_more_than_its_layer(module: str, absent: tuple[str, ...]) -> None:
    out = python(f"import sys, {module}\nprint(*[m for m in {absent!r} if m in sys.modules])")
    assert out.split() == []


def test_public_names_are_these_and_all_there() -> None:
    assert gradpilot.__all__ == PUBLIC
    assert dir(gradpilot) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(gradpilot, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        gradpilot.atach  # noqa: B018


def test_attach_and_its_handle_keep_their_shape() -> None:
    assert list(inspect.signature(gradpilot.attach).parameters) == ATTACH
    members = {name for name in dir(gradpilot.Handle) if not name.startswith("_")}
    documented = {"run", "model", "controller", "metrics_url"}  # set in __init__
    assert members | documented == HANDLE


def python(code: str, cwd: Path | None = None, **env: str) -> str:
    """Return what a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

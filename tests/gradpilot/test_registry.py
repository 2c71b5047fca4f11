"""Names and plug-ins: found by themselves, taken once, explained when unknown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradpilot.errors import ConfigError, UnknownNameError
from gradpilot.registry import Registry

PACKAGE = "plug_ins_of_a_test"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[type]]:
    """Return a registry over a package that the tests fill with modules."""
    folder = tmp_path / PACKAGE
    folder.mkdir()
    made: Registry[type] = Registry("toy", PACKAGE)
    (folder / "__init__.py").write_text("registry = None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__(PACKAGE)
    sys.modules[PACKAGE].registry = made  # type: ignore[attr-defined]
    yield made
    for name in [n for n in sys.modules if n.split(".")[0] == PACKAGE]:
        del sys.modules[name]


def add(tmp_path: Path, module: str, text: str) -> None:
    head = f"from {PACKAGE} import registry\n"
    (tmp_path / PACKAGE / f"{module}.py").write_text(head + text)


def test_a_new_file_is_a_new_member(registry: Registry[type], tmp_path: Path) -> None:
    add(tmp_path, "top", '@registry.register("top")\nclass Top: ...\n')
    add(tmp_path, "bear", '@registry.register("bear")\nclass Bear: ...\n')
    assert tuple(registry) == registry.names() == ("bear", "top")
    assert registry.get("top").__name__ == "Top"
    assert "bear" in registry
    assert "car" not in registry


def test_private_modules_are_helpers(registry: Registry[type], tmp_path: Path) -> None:
    add(tmp_path, "_broken", "raise AssertionError('must not be imported')\n")
    assert registry.names() == ()


def test_an_unknown_name_is_answered_with_the_known_ones(
    registry: Registry[type], tmp_path: Path
) -> None:
    add(tmp_path, "top", '@registry.register("top")\nclass Top: ...\n')
    with pytest.raises(UnknownNameError, match="unknown toy 'tap'; known: top"):
        registry.get("tap")


def test_a_name_is_taken_once(registry: Registry[type]) -> None:
    class Top: ...

    registry.register("top")(Top)
    registry.register("top")(Top)  # the same again, as a module imported twice does
    with pytest.raises(ConfigError, match="toy 'top' is registered twice"):
        registry.register("top")(type("Other", (), {}))
    assert registry.get("top") is Top


def test_a_broken_plug_in_is_reported_every_time(registry: Registry[type], tmp_path: Path) -> None:
    add(tmp_path, "broken", "raise ValueError('broken plug-in')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="broken plug-in"):
            registry.names()

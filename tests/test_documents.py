"""Documents name what exists: files, commands, targets, settings, plug-ins, versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pydantic import BaseModel

import gradpilot
from gradpilot.controller.config import ENV_CONFIG, ENV_NESTED, ENV_PREFIX, ControllerConfig
from gradpilot.protos.messages import Option
from gradpilot.protos.option_text import parse_option
from gradpilot.worker_agent import config
from gradpilot.worker_agent.compressors.base import COMPRESSORS
from tests.project import PROJECT, ROOT, project_files

DOCUMENTS = sorted(path for path in project_files() if path.suffix == ".md")
each_document = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix()
)

CODE = re.compile(r"^(?: {4}|\t)(.+)$|`([^`\n]+)`", re.MULTILINE)
"""Indented blocks line by line, and code within a line."""

OTHERS_VARIABLES = {
    "GRADPILOT_REQUIRE_ALL",  # the test suite's
    "GRADPILOT_EXIT_REPEATS",  # the test suite's
    "GRADPILOT_CONTROLLER_PORT",  # set by Kubernetes for a service of that name
}


def code(path: Path) -> Iterator[str]:
    for block, inline in CODE.findall(path.read_text()):
        yield block or inline


def anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@each_document
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {hit[1] for text in code(path) if (hit := re.match(r"make ([a-z][a-z-]*)", text))}
    assert asked <= targets


def test_make_lists_its_targets_and_how_each_sets_itself_up() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in ("install", "demo", "test", "lint", "protos", "bench-overhead", "clean"):
        assert f"make {name}" in listed


@pytest.fixture(scope="module")
def commands() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from gradpilot.cli import main; main(['--help'])"],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    return set(re.findall(r"^ {4}([a-z]+)\b", done.stdout, re.MULTILINE))


@each_document
def test_commands_exist(path: Path, commands: set[str]) -> None:
    asked = {hit[1] for text in code(path) if (hit := re.match(r"gradpilot ([a-z]+)", text))}
    assert asked <= commands


def test_every_operator_command_is_documented(commands: set[str]) -> None:
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/operators.md"))
    for command in commands - {"demo", "version", "policies"}:
        assert f"gradpilot {command}" in text


def controller_settings(
    model: type[BaseModel] = ControllerConfig, prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield name, default as it is written in TOML, and description."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from controller_settings(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", written(field.default), str(field.description)


def written(value: object) -> str:
    """Return a default as documents show it; nothing for what is empty."""
    if value in ("", {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        items = (f'"{item}"' if isinstance(item, str) else f"{item:g}" for item in value)
        return f"`[{', '.join(items)}]`"
    return f"`{value:g}`" if isinstance(value, int | float) else f"`{value}`"


@each_document
def test_variables_exist(path: Path) -> None:
    known = {*config.variables(), *OTHERS_VARIABLES, ENV_CONFIG}
    for name, _, _ in controller_settings():
        known.add(ENV_PREFIX + name.upper().replace(".", ENV_NESTED))
    mentioned = re.findall(r"GRADPILOT_[A-Z_]*[A-Z]", path.read_text())
    assert set(mentioned) - known <= {"GRADPILOT_CTL"}


def rows(path: str, heading: str) -> list[tuple[str, ...]]:
    """Return the cells of the tables below a heading, without their head and emphasis."""
    text = (ROOT / path).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [tuple(cell.strip() for cell in line.split(" | ")) for line in lines]


def test_agent_settings_are_documented_as_they_are() -> None:
    documented = [
        (name, default) for name, default, _ in rows("docs/configuration.md", "Agent")[1:]
    ]
    assert documented == [
        (f"`{config.PREFIX}{field.name.upper()}`", written(field.default))
        for field in fields(config.AgentConfig)
    ]


def test_controller_settings_are_documented_as_they_are() -> None:
    documented = rows("docs/configuration.md", "Controller")
    table = documented[documented.index(("name", "default", "meaning")) + 1 :]
    assert table == [(f"`{n}`", default, text) for n, default, text in controller_settings()]


def test_options_in_words_are_read_as_documented() -> None:
    path = ROOT / "docs" / "configuration.md"
    section = path.read_text().split("\n## Options in words\n")[1]
    examples = re.findall(r"^    (.+)$", section, re.MULTILINE)
    assert len(examples) >= 3
    for example in examples:
        assert parse_option(example).compressor in COMPRESSORS
    defaults = {field.name: field.default for field in fields(Option)}
    table = rows("docs/configuration.md", "Options in words")[1:]
    assert {name.strip("`") for name, *_ in table} == set(defaults) - {"compressor", "settings"}
    for name, default, _ in table:
        assert default == written(defaults[name.strip("`")])


def test_the_readme_lists_every_compressor_and_no_other() -> None:
    cells = rows("README.md", "Use it")[1:]
    assert {name for cell, *_ in cells for name in re.findall(r"\w+", cell)} == set(COMPRESSORS)


def test_the_readme_gives_a_reason_for_every_dependency() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *extras["torch"], *extras["controller"]]
    named = {
        name.lower()
        for cell, _ in rows("README.md", "Dependencies")
        for name in re.findall(r"`([\w-]+)`", cell)
    }
    assert named == {Requirement(text).name.lower() for text in asked}


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    entries = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == gradpilot.__version__ == PROJECT["project"]["version"]

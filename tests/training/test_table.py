"""``docs/compatibility.md``: each cell has its test, and each mode that is tested its cell."""

from __future__ import annotations

import ast
import re

import pytest

from tests.project import ROOT
from tests.training import test_accumulation, test_ddp_modes, test_refused

TABLE = (ROOT / "docs" / "compatibility.md").read_text()
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in TABLE.splitlines()
    if line.startswith("| ") and not line.startswith(("| mode |", "| form |"))
]
LINK = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`")


def _functions(path: str) -> tuple[set[str], set[str]]:
    """Return the names of a file's functions, and all its texts."""
    tree = ast.parse((ROOT / path).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return names, texts


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_says_what_comes_of_it_and_names_tests_that_exist(row: list[str]) -> None:
    _, outcome, links, *_ = row
    found = LINK.findall(links)
    linked = re.fullmatch(r"\[(works|observe only|refused)\]\(\.\./(.+)\)", outcome)
    assert linked is not None, outcome
    assert linked[2] == found[0][0]
    assert len(found) == links.count("::") >= 1
    for path, name, case in found:
        names, texts = _functions(path)
        assert name in names, f"{path} has no {name}"
        # Of two parameters, the second names a function.
        parts = [(case[:i], case[i + 1 :]) for i, letter in enumerate(case) if letter == "-"]
        pairs = [a for a, b in parts if a in texts and b in names]
        assert not case or case in texts or pairs, f"{path} has no case {case!r}"


def test_every_mode_that_is_tested_is_in_the_table() -> None:
    cases = {
        *(mode.name for mode in (*test_ddp_modes.MODES, *test_accumulation.MODES)),
        *test_refused.CASES,
    }
    assert cases - {case for _, _, case in LINK.findall(TABLE)} == set()

"""Documents show what the result files hold, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import results_file
from bench.report import documents, headlines
from bench.report.__main__ import main
from bench.report.results import ReportError, load, table
from bench.report.section import CAUSE_UNKNOWN, Section, figures, wrapped
from tests.project import ROOT

SECTIONS = documents.all_sections()
WITH_RESULTS = [s for s in SECTIONS if load(s.result, results_file.RESULTS) is not None]


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """Return a copy of the result files and figures."""
    folder = tmp_path / "results"
    shutil.copytree(results_file.RESULTS, folder)
    return folder


def changed(folder: Path, name: str, change: Any) -> None:
    """Change a result file with a function of its document."""
    path = folder / f"{name}.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_the_documents_are_what_the_result_files_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_number_that_changed_is_seen_in_every_document(
    planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check", "--results", str(planted)]) == 0
    before = {path: path.read_text(encoding="utf-8") for path in documents.build(planted)}

    def lost(document: dict[str, Any]) -> None:
        document["verdicts"][1]["measured"] = 17

    def failed(document: dict[str, Any]) -> None:
        next(row for row in document["rows"] if row.get("claim") == "T2")["holds"] = False

    def faster(document: dict[str, Any]) -> None:
        document["rows"][0]["measured_mbit"] = 1234.5

    changed(planted, "netlab", faster)
    changed(planted, "chaos", lost)
    changed(planted, "claims", failed)
    assert main(["--check", "--results", str(planted)]) == 1
    said = capsys.readouterr().err
    for name in ("docs/benchmarks.md", "README.md", "docs/claims.md", "docs/netlab.md"):
        assert f"{name} is not what the result files say" in said
    assert before == {path: path.read_text(encoding="utf-8") for path in before}


def test_a_section_without_its_file_is_one_line(planted: Path) -> None:
    (planted / "chaos.json").unlink()
    text = documents.benchmarks(planted)
    assert "## Faults\n\nNot measured: there is no `bench/results/chaos.json`.\n" in text
    assert "chaos" not in headlines.block(SECTIONS, planted)


def test_a_file_that_is_no_result_file_is_refused(
    planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(planted, "chaos", lambda document: document.pop("machine"))
    assert main(["--check", "--results", str(planted)]) == 2
    assert "chaos.json: field 'machine' is missing" in capsys.readouterr().err


@pytest.mark.parametrize("section", WITH_RESULTS, ids=lambda section: section.result)
def test_every_section_says_how_to_repeat_it_and_why_targets_were_missed(section: Section) -> None:
    result = load(section.result, results_file.RESULTS)
    assert result is not None
    text = section.render(result)
    assert f"    {result.document['command']}\n" in text
    assert result.document["created"][:10] in text
    assert "{targets}" in section.text or section.result == "claims"
    assert list(section.untrue(result)) == []
    for pattern in section.reasons:
        re.compile(pattern)


def test_every_result_file_has_a_section_or_a_part_of_a_document() -> None:
    files = {path.stem for path in results_file.RESULTS.glob("*.json")}
    assert files <= {section.result for section in SECTIONS} | set(documents.BLOCKS)


# --- sections ------------------------------------------------------------------------------------


@pytest.fixture
def section() -> Section:
    return Section(
        position=1,
        title="Trial",
        result="chaos",
        text="On {ranks} ranks all went well.\n\n{targets}",
        places=lambda result: {"ranks": str(result.document["rows"][0]["ranks"])},
    )


def test_a_figure_that_is_typed_is_refused(section: Section) -> None:
    result = load("chaos", results_file.RESULTS)
    assert result is not None
    typed = replace(section, text="{ranks} ranks, 12 % slower, {targets}")
    with pytest.raises(ReportError, match=r"figures that no file gives: \['12'\]"):
        typed.render(result)
    assert "12 % slower" in replace(typed, given={"12": "a setting"}).render(result)
    assert figures("in `x = 4` and fp32 at top-2, C1, [x](y/3) and {n_2} but 1.5 and 2,000") == [
        "1.5",
        "2,000",
    ]


def test_places_and_values_must_be_the_same(section: Section) -> None:
    result = load("chaos", results_file.RESULTS)
    assert result is not None
    with pytest.raises(ReportError, match="no value for"):
        replace(section, text="{ranks} {other}").render(result)
    with pytest.raises(ReportError, match=r"no place for \['ranks'\]"):
        replace(section, text="nothing").render(result)


def test_words_that_figures_do_not_bear_out_are_named(section: Section) -> None:
    result = load("chaos", results_file.RESULTS)
    assert result is not None
    wrong = replace(section, words=lambda _: {"all went well": False, "nobody knows": True})
    assert [text.split(", ")[-1] for text in wrong.untrue(result)] == [
        "which its figures do not bear out",
        "which it does not say",
    ]


def test_a_target_that_was_missed_is_shown_with_its_cause(section: Section, planted: Path) -> None:
    def missed(document: dict[str, Any]) -> None:
        for one in document["verdicts"][:2]:
            one.update(holds=False, measured=0.123456)

    changed(planted, "chaos", missed)
    result = load("chaos", planted)
    assert result is not None
    shown = replace(section, reasons={"hang": "a lock"}).render(result)
    assert "3 of 5 targets are met." in shown
    assert f"| schedules that were over | 200 | 0.1235 | {CAUSE_UNKNOWN} |" in shown
    assert "| schedules that hang | 0 | 0.1235 | a lock |" in shown


def test_a_question_without_one_answer_is_an_error() -> None:
    result = load("overhead", results_file.RESULTS)
    assert result is not None
    with pytest.raises(ReportError, match="0 rows"):
        result.row(case="no such")
    with pytest.raises(ReportError, match="verdicts like"):
        result.verdict("managed")


def test_marks_that_are_gone_are_an_error() -> None:
    with pytest.raises(ReportError, match="lost its marks"):
        documents.put("no marks", "results", "x")


def test_markdown_is_broken_between_words_and_never_in_code() -> None:
    text = wrapped(
        f"{'word ' * 30}`code with spaces` {'word ' * 20}\n\n- one\n- {'two ' * 60}\n\n| a |\n"
    )
    assert max(map(len, text.splitlines())) <= 108
    assert "`code with spaces`" in text
    assert "\n- one\n- two" in text
    assert "\n  two" in text
    assert table(("a", "b"), [("1", "")]) == "| a | b |\n|---|---|\n| 1 | |"


# --- README ---------------------------------------------------------------------------------------

MEASURED = re.compile(
    r"(?<![\w.])\d+(?:\.\d+)?(?: ?%|x\b| (?:ms|seconds|minutes|times|points|Mbit/s)\b)"
)


def test_the_readme_has_no_figure_beside_those_of_its_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = text.split(documents.BEGIN.format("results"))
    block, after = rest.split(documents.END)
    prose = re.sub(r"`[^`]*`|^ {4}.*$", "", before + after, flags=re.MULTILINE)
    assert MEASURED.findall(prose) == []
    assert MEASURED.findall("at 3 % of 12 ms, 2x") == ["3 %", "12 ms", "2x"]
    lines = block.strip().splitlines()[2:]
    assert lines
    for line in lines:
        (name,) = re.findall(r"\]\(bench/results/(\w+)\.json\)", line)
        assert load(name, results_file.RESULTS) is not None

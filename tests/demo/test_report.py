from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gradpilot.demo.report import BANNER, render, write_report
from gradpilot.demo.result import Runs, build
from tests.demo.planted import runs

CHARTS = (
    "Step time over steps",
    "Test accuracy over training time",
    "Link estimate against the emulated link",
    "Plan in force over steps",
    "Pareto front of decision 1",
    "Pareto front of decision 3",
    "Pareto front of decision 4",
)


def _parse(of: Runs) -> ElementTree.Element:
    page = render(of, build(of, 1.0))
    head, body = page.split("\n", 1)
    assert head == "<!DOCTYPE html>"
    return ElementTree.fromstring(body)


@pytest.fixture(scope="module")
def page() -> ElementTree.Element:
    return _parse(runs())


def test_all_charts_are_there_and_none_is_empty(page: ElementTree.Element) -> None:
    charts = {svg.get("aria-label"): svg for svg in page.iter("svg")}
    assert tuple(charts) == CHARTS
    for svg in charts.values():
        shapes = [e for e in svg.iter() if e.tag in ("polyline", "circle", "rect")]
        assert len(shapes) >= 3


def test_both_runs_are_drawn_step_by_step(page: ElementTree.Element) -> None:
    chart = next(svg for svg in page.iter("svg") if svg.get("aria-label") == CHARTS[0])
    for kind in ("adaptive", "baseline"):
        lines = [e for e in chart.iter("polyline") if e.get("class") == kind]
        assert max(len(e.get("points", "").split()) for e in lines) == 120


def test_it_says_that_the_link_is_emulated(page: ElementTree.Element) -> None:
    banner = next(e for e in page.iter("div") if e.get("class") == "banner")
    assert banner.text == BANNER
    assert "emulated" in BANNER
    title = page.find("head/title")
    assert title is not None
    assert "emulated" in (title.text or "")


def test_claims_and_reasons_are_in_it(page: ElementTree.Element) -> None:
    text = " ".join(page.itertext())
    for claim in build(runs(), 1.0)["claims"]:
        assert claim["name"] in text
    assert "switch to topk 1% allgather <planted & plain>" in text
    assert "fails" in text  # two switches of three


def test_it_needs_nothing_else(page: ElementTree.Element) -> None:
    text = render(runs(), build(runs(), 1.0))
    assert not re.search(r"<(script|link|img|iframe)|https?://|url\(", text)


def test_both_colour_schemes_define_the_same_colours() -> None:
    text = render(runs(), build(runs(), 1.0))
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    names = set(re.findall(r"(--\w+):", light))
    assert names == set(re.findall(r"(--\w+):", dark)) | ({"--card"} - names)
    assert set(re.findall(r"var\((--\w+)\)", text)) <= names


def test_a_run_without_decisions_can_be_reported() -> None:
    silent = replace(runs(), decisions=())
    assert len(list(_parse(silent).iter("svg"))) == 4


def test_the_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "index.html"
    write_report(path, runs(), build(runs(), 1.0))
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")

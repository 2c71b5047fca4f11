"""Planted times for the arithmetic, two ranks over loopback for the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import results_file
from bench.modes import __main__ as command
from bench.modes import analysis
from bench.modes.catalog import MODES
from bench.modes.job import Orders, Told
from bench.modes.measure import FULL, LINK, Measured, Setup
from bench.modes.models import Size
from bench.report.results import load
from bench.report.sections import modes as section
from tests.project import ROOT

OVER_LOOPBACK, OVER_LINK = "loopback", "1000 Mbit/s, 1 ms"


def told(
    plain: tuple[float, ...] = (0.1, 0.1, 0.1),
    managed: tuple[float, ...] = (0.101, 0.101, 0.101),
) -> Told:
    """Return what a rank tells."""
    return Told(plain, managed, 4, 2_000_000, "fixed", dense=True, bit_equal=True)


def planted(**changed: tuple[Told, ...]) -> Measured:
    """Return three modes of two ranks, some of them otherwise."""
    return {mode: (told(), told()) for mode in ("plain", "join", "compile")} | changed


def whole(over_loopback: Measured, over_link: Measured) -> list[analysis.Row]:
    """Return the rows of both environments."""
    return [
        *analysis.rows(Setup(None), over_loopback),
        *analysis.rows(Setup(LINK), over_link),
    ]


def test_a_block_is_the_slowest_ranks_and_ratios_are_of_pairs() -> None:
    first = told((0.10, 0.20, 0.40), (0.11, 0.21, 0.40))
    second = told((0.08, 0.25, 0.30), (0.12, 0.20, 0.44))
    row = analysis.row(Setup(None), "plain", (first, second))
    # Pairs: 0.12 / 0.10, 0.21 / 0.25, 0.44 / 0.40.
    assert row["ratio_median"] == pytest.approx(1.1)
    assert row["ratio_all"] == pytest.approx(0.77 / 0.75, abs=1e-4)
    assert (row["plain_step_ms"], row["managed_step_ms"]) == (250.0, 210.0)
    assert row["ratio_p10"] < 0.84 + 1e-9 < 1.2 - 1e-9 < row["ratio_p90"]
    assert (row["blocks"], row["ranks"], row["rate_mbit"]) == (3, 2, None)


def test_each_environment_is_judged_by_its_median_and_its_worst_mode() -> None:
    slow = (told(managed=(0.104, 0.104, 0.104)), told())
    rows = whole(planted(), planted(join=slow))
    verdicts = {one["name"]: one for one in analysis.verdicts(rows)}
    about = "managed dense plan / plain, "
    assert verdicts[f"{about}{OVER_LOOPBACK}: median of 3 modes"]["measured"] == 1.01
    assert verdicts[f"{about}{OVER_LINK}: median of 3 modes"]["holds"]
    worst = verdicts[f"{about}{OVER_LINK}: worst mode, join"]
    assert (worst["target"], worst["measured"], worst["holds"]) == ("<= 1.03", 1.04, False)
    assert sum(not one["holds"] for one in verdicts.values()) == 1


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"bit_equal": False}, "parameters of both copies the same bits, of 6 rows"),
        ({"dense": False}, "every bucket dense and the agent at work all the time, of 6 rows"),
        ({"buckets": 3}, "buckets of a step, least"),
    ],
)
def test_one_rank_that_is_wrong_is_seen(wrong: dict[str, int], name: str) -> None:
    both = (told(), replace(told(), **wrong))  # type: ignore[arg-type]
    verdicts = analysis.verdicts(whole(planted(), planted(compile=both)))
    (missed,) = (one for one in verdicts if not one["holds"])
    assert missed["name"] == name
    assert missed["measured"] in (3, f"compile ({OVER_LINK})")


@pytest.mark.parametrize(
    ("linked", "words"), [(0.1005, section.HIDDEN), (0.101, section.SHOWN)], ids=str
)
def test_the_report_shows_every_row(tmp_path: Path, linked: float, words: str) -> None:
    hardly = (told(managed=(linked,) * 3),) * 2
    rows = whole(planted(), planted(plain=hardly, join=hardly, compile=hardly))
    path = tmp_path / "modes.json"
    results_file.write("modes", "python -m bench.modes", [0], rows, analysis.verdicts(rows), path)
    result = load("modes", tmp_path)
    assert result is not None
    text = " ".join(section.SECTION.render(result).split())
    for mode in ("nothing special", "`join()`, uneven inputs", MODES["compile"].what):
        assert f"| {mode} | 100 ms | 1.010 (1.01 to 1.01) | 100 ms | {linked / 0.1:.3f} (" in text
    assert words in text
    assert "the gradient takes 64 ms, about as long as the model computes" in text
    assert "the same parameters, bit for bit" in text
    assert "All 7 targets are met." in text
    assert list(section.SECTION.untrue(result)) == []
    assert len(section.SECTION.headlines(result)) == 4


def test_the_full_run_has_every_mode_that_the_document_says_works() -> None:
    assert all(setup.modes == tuple(MODES) and setup.controller for setup in FULL)
    assert [setup.link for setup in FULL] == [None, LINK]
    document = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    shown = " ".join(mode.what for mode in MODES.values())
    for name in (
        *("`gradient_as_bucket_view`", "`static_graph`", "`find_unused_parameters`", "`no_sync`"),
        *("`join()`", "activation checkpointing, reentrant", "`torch.compile`"),
        *("activation checkpointing, not reentrant", "FSDP2 (`fully_shard`)"),
    ):
        assert name in document
        assert name in shown


def test_orders_survive_the_way_to_the_ranks(tmp_path: Path) -> None:
    orders = Orders(("plain", "join"), Size(32, 4, 8, 0.004), "off", 2, 3, 4, 60.0)
    orders.write(tmp_path)
    assert Orders.read(tmp_path) == orders


@pytest.mark.processes
def test_two_modes_over_loopback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Setup(None, size=Size(32, 4, 8, 0.004), blocks=2, block_steps=2, warm_up_steps=4)
    monkeypatch.setattr(command, "QUICK", (tiny,))
    monkeypatch.setattr(command, "missing", list)
    path = tmp_path / "modes.json"
    arguments = ["--quick", "--modes", "plain,join", "--result", str(path), "--output", "json"]
    assert command.main(arguments) == 0
    document = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out) == document
    assert results_file.check(document) == []
    assert [row["mode"] for row in document["rows"]] == ["plain", "join"]
    for row in document["rows"]:
        assert row["ratio_median"] > 0
        assert row["elements"] == 8 * (32 * 32 + 32)
    correct = {one["name"]: one["holds"] for one in document["verdicts"][2:]}
    assert len(correct) == 3
    assert all(correct.values()), document


def test_an_unknown_mode_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--modes", "plain,no_such"])
    assert "no mode no_such" in capsys.readouterr().err


def test_without_emulated_hosts_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "missing", lambda: ["root"])
    assert command.main([]) == 2
    assert "needs emulated hosts, and root" in capsys.readouterr().err

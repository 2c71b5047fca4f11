"""Planted times for the arithmetic, two ranks over loopback and two emulated hosts for the rest."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench import results_file
from bench._processes import environment
from bench.netlab import Link, leftovers, missing
from bench.network_model import __main__ as command
from bench.network_model import analysis, grid
from bench.network_model.analysis import Judged
from bench.network_model.grid import Cell, Grid, bytes_per_second, handed_in
from bench.network_model.ranks import Ranks, RanksFailedError, Run
from gradpilot.policies.cost import Affine
from gradpilot.protos.messages import COLLECTIVES
from tests.conftest import require_tool

SIZES = grid.SIZES


def planted(
    kinds: tuple[str, ...] = ("all_reduce", "ring", "broadcast"),
    ranks: int = 4,
    slower: float = 1.0,
    later: float = 1.0,
) -> list[Cell]:
    """Return cells that follow the cost model on a link other than asked for."""
    cells = []
    for link in grid.NETWORKS:
        alpha, beta = later * link.one_way_seconds, slower / bytes_per_second(link)
        for kind in kinds:
            for size in SIZES:
                payload = handed_in(kind, size, ranks)
                seconds = analysis.form(kind, ranks).seconds(alpha, beta, payload)
                times = (0.99 * seconds, seconds, 1.01 * seconds)
                cells.append(Cell(kind, ranks, link, size, times, (size, size // 2)))
    return cells


def test_a_link_as_asked_for_is_foretold_exactly() -> None:
    judged = analysis.asked(planted())
    assert len(judged) == len(planted())
    assert analysis.errors(judged) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_errors_are_relative_and_signed() -> None:
    cell = planted()[0]
    judged = [Judged(cell, "asked", factor * cell.median) for factor in (0.9, 1.0, 1.02, 1.04, 1.2)]
    assert [round(one.error, 3) for one in judged] == [-0.1, 0, 0.02, 0.04, 0.2]
    median, p90 = analysis.errors(judged)
    assert median == pytest.approx(0.04)
    assert p90 == pytest.approx(0.16)  # between the two largest, 0.1 and 0.2


def test_a_fit_corrects_the_link_and_is_judged_on_other_sizes() -> None:
    cells = planted(slower=1.3, later=1.5)
    assert analysis.errors(analysis.asked(cells))[0] > 0.2
    judged = analysis.fitted(cells)
    assert analysis.errors(judged)[1] < 1e-3
    assert {one.cell.size for one in judged} == {SIZES[1], SIZES[3]}
    # What the fit does not see does not change it.
    wrong = [
        replace(c, seconds=tuple(2 * s for s in c.seconds)) if c.size in SIZES[1::2] else c
        for c in cells
    ]
    assert analysis.errors(analysis.fitted(wrong))[0] == pytest.approx(0.5, abs=1e-3)


def test_forms_are_found_and_judged_on_other_networks() -> None:
    cells = [
        replace(c, seconds=(Affine(5.0, 2.0).seconds(*analysis._link(c.link), c.handed_in),))
        for c in planted(("broadcast",))
    ]
    judged, forms = analysis.affine(cells)
    assert forms["broadcast", 4] == pytest.approx((5.0, 2.0))
    assert analysis.errors(judged)[1] < 1e-9
    fitted_to = {c.link for c in cells} - {one.cell.link for one in judged}
    assert len(fitted_to) == len(grid.NETWORKS) // 2


def test_a_form_has_no_negative_coefficient() -> None:
    # The more latency the faster: nonsense, of which only the bytes are kept.
    cells = [
        replace(c, seconds=(c.handed_in / bytes_per_second(c.link) / (1 + c.link.rtt_ms),))
        for c in planted(("ring",))
    ]
    form = analysis.fit_form(cells)
    assert form.alphas == 0
    assert form.payloads > 0


def test_one_network_alone_has_no_form() -> None:
    cells = [c for c in planted() if c.link == grid.NETWORKS[0]]
    assert analysis.affine(cells) == ([], {})
    assert not [r for r in analysis.rows(cells) if r["prediction" if "prediction" in r else "case"]
                == "affine"]  # fmt: skip


def test_rows_and_verdicts_follow_the_format(tmp_path: Path) -> None:
    rows = analysis.rows(planted())
    cases = [row["case"] for row in rows]
    assert cases.count("cell") == len(planted())
    assert cases.count("errors") == 3 * (1 + 3)
    assert cases.count("coefficients") == 3
    verdicts = analysis.verdicts(rows)
    assert len(verdicts) == 2 * 2 * (1 + 3)
    assert all(v["holds"] for v in verdicts)
    path = results_file.write("x", "c", [0], rows, verdicts, tmp_path / "x.json")
    assert results_file.check(json.loads(path.read_text())) == []
    assert "busiest rank sends" in command.text(rows, verdicts)


def test_a_model_that_is_off_is_said_to_be() -> None:
    verdicts = analysis.verdicts(analysis.rows(planted(slower=1.1, later=1.1)))
    held = {v["name"]: v["holds"] for v in verdicts}
    # 9 % too fast everywhere: too much for a median, not for a tenth of all.
    assert not held["relative error of predicted time, asked link, all: median, %"]
    assert held["relative error of predicted time, asked link, all: p90, %"]
    assert held["relative error of predicted time, fitted link, all: median, %"]


def test_no_more_traffic_than_the_machine_can_carry() -> None:
    assert Grid().carried(4) == list(grid.NETWORKS)
    assert [link.rate_mbit for link in Grid().carried(8)] == [50, 100, 100, 200, 200]


def test_what_ranks_hand_in() -> None:
    assert handed_in("all_gather", 4096, 8) == 512
    assert handed_in("all_to_all", 4096, 8) == 4096
    assert bytes_per_second(Link(rate_mbit=100)) == pytest.approx(11.955e6, rel=1e-4)


def time_all_then_fail(small: Grid, found: list[Cell]) -> None:
    with Ranks(2, None, 60.0) as processes:
        found += grid.cells(processes, 2, Link(rate_mbit=10_000), small)
        processes.time([Run("no_such", 0, 4096)], 20.0)


@pytest.mark.processes
def test_every_collective_is_timed_over_loopback_and_a_failure_is_told() -> None:
    small = Grid(sizes=(1 << 12, 1 << 16), repeats=2)
    cells: list[Cell] = []
    with pytest.raises(RanksFailedError, match="unknown collective 'no_such'"):
        time_all_then_fail(small, cells)
    assert {(c.kind, c.size) for c in cells} == {(k, s) for k in COLLECTIVES for s in small.sizes}
    for cell in cells:
        assert len(cell.seconds) == small.repeats
        assert all(0 < s < 5 for s in cell.seconds)
        assert len(cell.sent) == 2
        assert sum(cell.sent) >= cell.handed_in  # at least one rank's bytes went out


@pytest.mark.tools
@pytest.mark.processes
def test_emulated_hosts_foretell_a_transfer() -> None:
    def netlab() -> bool:
        return not missing()

    require_tool(
        netlab, "root, iproute2, iptables, and a kernel with veth, bridge, HTB and NFQUEUE"
    )
    link = Link(rate_mbit=40, rtt_ms=2)
    kinds = ("broadcast", "scatter_broadcast")
    cells = grid.measure(Grid((2,), (link,), (1 << 19,), kinds, repeats=1))
    assert leftovers(grid.LAB) == []
    for cell in cells:
        # One payload goes from one host to the other; the machine may be busy.
        assert cell.sent[0] == pytest.approx(cell.size, rel=0.1)
        assert cell.sent[1] < 0.1 * cell.size
        assert 0.9 < cell.median / (cell.size / bytes_per_second(link)) < 2.5


def test_ranks_inherit_nothing_that_configures_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADPILOT_OPTION", "GLOO_SOCKET_IFNAME", "HTTPS_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "something")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    found = environment()
    assert not {name for name in found if name.startswith(("GRADPILOT_", "GLOO_"))}
    assert not {name for name in found if name.lower().endswith("_proxy")}
    assert found["OMP_NUM_THREADS"] == "1"
    first, *rest = found["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "gradpilot").is_dir()
    assert rest == ["elsewhere"]

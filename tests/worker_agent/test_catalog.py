from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradpilot.protos.messages import Catalog
from gradpilot.protos.validate import validate_catalog
from gradpilot.worker_agent import catalog
from gradpilot.worker_agent.buckets import BucketTable
from gradpilot.worker_agent.catalog import (
    CALIBRATION_ELEMENTS,
    CALIBRATION_SECONDS,
    abilities,
    calibrate,
    families,
)
from gradpilot.worker_agent.compressors.base import COMPRESSORS, At, Estimate, Rounds, create
from gradpilot.worker_agent.compressors.powersgd import PowerSgd
from tests.worker_agent.buckets import fake_bucket, named

N = 4


def _table() -> BucketTable:
    parameters = named([100_000, 300])
    table = BucketTable(parameters.items())
    for index, p in enumerate(parameters.values()):
        table.identify(fake_bucket([p], index, last=index == 1))
    table.end_step()
    return table


def test_the_catalog_lists_calibrated_compressors_with_exact_bytes() -> None:
    table = _table()
    found = families(table.slots, N)
    calibrated = {name for name in COMPRESSORS if COMPRESSORS.get(name).calibrated}
    assert {family.compressor for family in found} == calibrated
    assert {"none", "bf16"} <= calibrated
    for family in found:
        ratios = [point.ratio for point in family.ladder]
        assert ratios == sorted(set(ratios))
        for point in family.ladder:
            option = family.option(point.ratio, family.collectives[0])
            for bucket, slot in zip(point.buckets, table.slots, strict=True):
                stated = [(r.collective, r.bytes) for r in bucket.rounds]
                exact = create(option).wire(slot.bucket.elements, slot.shapes, N)
                assert stated == [(r.collective, r.bytes) for r in exact]


def test_only_settings_that_were_trained_with_are_offered() -> None:
    """Sums in 8 bits leave fewer levels the more ranks there are; a rank of 1 costs many steps."""

    def offered(ranks: int) -> set[tuple[str, str]]:
        found = families(_table().slots, ranks)
        return {(f.compressor, s.value) for f in found for s in f.settings
                if s.name in ("exchange", "rank")}  # fmt: skip

    assert offered(18) - offered(19) == {("int8", "all_reduce")}
    assert offered(8) - offered(9) == {("int8", "all_gather")}, "9 payloads are over two buckets"
    assert {of for of in offered(18) if of[0] == "powersgd"} == {
        ("powersgd", "4"),
        ("powersgd", "16"),
    }


def test_a_matrix_is_timed_as_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one vector PowerSGD would send it as it is, which costs next to nothing."""
    sent: dict[str, list[int]] = {}
    bare = PowerSgd.rounds

    def watched(self: PowerSgd, grad: Tensor, at: At) -> Rounds:
        rounds = bare(self, grad, at)
        request = next(rounds)
        while True:
            sent.setdefault(f"{self.rank} of {grad.numel()}", []).append(request.payload.numel())
            try:
                request = rounds.send((yield request))
            except StopIteration as stop:
                done: Estimate = stop.value
                return done

    monkeypatch.setattr(catalog, "CALIBRATION_SECONDS", 60.0)
    monkeypatch.setattr(PowerSgd, "rounds", watched)
    calibrate(N, torch.device("cpu"))
    small, large = CALIBRATION_ELEMENTS
    assert set(sent) == {f"{r} of {n}" for r in (4, 16) for n in (small, large)}
    assert sent[f"16 of {small}"][:2] == [16 * 128, 16 * 128]
    assert sent[f"4 of {large}"][:2] == [4 * 512, 4 * 1024]


def test_small_payloads_are_marked_as_never_skipped() -> None:
    table = _table()
    dense = next(f for f in families(table.slots, N) if f.compressor == "none")
    large, small = dense.ladder[0].buckets
    assert [r.skippable for r in large.rounds] == [True]
    assert [r.skippable for r in small.rounds] == [False]


def test_calibration_times_every_member_and_the_whole_is_a_valid_catalog() -> None:
    torch.set_num_threads(1)
    samples = calibrate(N, torch.device("cpu"))
    kinds = [COMPRESSORS.get(name) for name in COMPRESSORS]
    members = sum(member.calibrated_for(N) for kind in kinds for member in kind.ladder())
    assert 0 < len(samples) <= members * len(CALIBRATION_ELEMENTS)
    for sample in samples:
        assert sample.elements in CALIBRATION_ELEMENTS
        for seconds in (sample.compress_seconds, sample.decompress_seconds):
            assert math.isfinite(seconds)
            assert 0.0 <= seconds < CALIBRATION_SECONDS
    table = _table()
    assert table.layout is not None
    able = abilities(N, layered=False)
    validate_catalog(Catalog(table.layout, families(table.slots, N), samples, able))


def test_abilities_list_every_compressor_with_who_can_carry_it() -> None:
    flat = {a.compressor: a.collectives for a in abilities(4, layered=False)}
    assert set(flat) == set(COMPRESSORS), "with 4 ranks each of them can be used"
    assert flat["topk"] == ("allgather",)
    assert {"native", "ring"} <= set(flat["none"])
    assert not any("hierarchical" in carriers for carriers in flat.values())
    layered = {a.compressor: a.collectives for a in abilities(4, layered=True)}
    assert layered["topk"] == ("allgather", "hierarchical")

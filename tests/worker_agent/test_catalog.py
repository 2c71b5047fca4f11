from __future__ import annotations

import math

import torch

from gradpilot.protos.messages import Catalog
from gradpilot.protos.validate import validate_catalog
from gradpilot.worker_agent.buckets import BucketTable
from gradpilot.worker_agent.catalog import (
    CALIBRATION_ELEMENTS,
    CALIBRATION_SECONDS,
    abilities,
    calibrate,
    families,
)
from gradpilot.worker_agent.compressors.base import COMPRESSORS, create
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
                exact = create(option).wire(slot.bucket.elements, slot.shapes)
                assert stated == [(r.collective, r.bytes) for r in exact]


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
    members = sum(len(kind.ladder()) for kind in kinds if kind.calibrated)
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

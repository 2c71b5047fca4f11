from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradpilot.errors import ProtocolError
from gradpilot.protos.messages import BucketRounds, Catalog, Family, WireRound
from gradpilot.protos.validate import validate_catalog
from gradpilot.simulate.catalog import compute_samples, families
from gradpilot.simulate.jobs import JOBS, make_job
from gradpilot.worker_agent import catalog
from gradpilot.worker_agent.buckets import Slot
from gradpilot.worker_agent.compressors.base import COMPRESSORS


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
@pytest.mark.parametrize("name", JOBS)
def test_it_is_the_catalog_of_the_agents(name: str, ranks: int) -> None:
    """If this fails, the agents can do something else now: record it again."""
    layout = make_job(name).layout
    slots = tuple(
        Slot(b, (b.fingerprint,), ((0, b.elements),), (torch.Size([b.elements]),))
        for b in layout.buckets
    )
    found = families(layout, ranks)
    agents = tuple(f for f in catalog.families(slots, ranks) if not _left_out(f))
    assert [_sizeless(family) for family in found] == [_sizeless(family) for family in agents]
    for family, other in zip(found, agents, strict=True):
        # Blocks with a scale each are counted in whole ones by the agents, else bytes are exact.
        about = 8 if family.compressor == "int8" else 0
        for one, same in zip(_rounds(family), _rounds(other), strict=True):
            assert one.bytes == pytest.approx(same.bytes, abs=about, rel=0)


def _left_out(family: Family) -> bool:
    """Return whether shapes or the number of ranks decide about bytes: not known here."""
    shaped = COMPRESSORS.get(family.compressor).needs_matrices
    return shaped or any(r.collective == "all_to_all" for r in _rounds(family))


def _rounds(family: Family) -> list[WireRound]:
    return [r for point in family.ladder for bucket in point.buckets for r in bucket.rounds]


def _sizeless(family: Family) -> Family:
    return replace(
        family,
        ladder=tuple(
            replace(
                point,
                buckets=tuple(
                    BucketRounds(tuple(replace(r, bytes=0) for r in bucket.rounds))
                    for bucket in point.buckets
                ),
            )
            for point in family.ladder
        ),
    )


@pytest.mark.parametrize("ranks", [2, 8, 1024])
def test_a_controller_takes_it(ranks: int) -> None:
    layout, other = (make_job(name).layout for name in ("transformer", "cnn"))
    validate_catalog(Catalog(layout, families(layout, ranks), compute_samples(ranks, 0.1)))
    with pytest.raises(ProtocolError, match="buckets"):
        validate_catalog(Catalog(layout, families(other, ranks)))


def test_costs_grow_with_ranks_only_behind_an_all_gather() -> None:
    few, many = compute_samples(8), compute_samples(1024)
    for one, other in zip(few, many, strict=True):
        assert one.compress_seconds == other.compress_seconds
        assert 0 <= one.decompress_seconds <= other.decompress_seconds
    large = [s for s in many if s.compressor == "topk" and s.ratio == 0.1][-1]
    small = [s for s in few if s.compressor == "topk" and s.ratio == 0.1][-1]
    assert large.decompress_seconds > 20 * small.decompress_seconds
    scaled = compute_samples(8, 0.5)
    assert scaled[0].compress_seconds == pytest.approx(0.5 * few[0].compress_seconds)

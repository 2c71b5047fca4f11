from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import _baselines, _compressor_jobs, _gradients, compressors, results_file
from bench._memory import peak_extra_bytes
from bench._rounds import rehearse
from bench._verdicts import verdicts
from gradpilot.worker_agent.compressors.base import COMPRESSORS, option_of
from gradpilot.worker_agent.compressors.powersgd import PowerSgd
from gradpilot.worker_agent.compressors.topk import TopK
from gradpilot.worker_agent.virtual import virtual_step

TINY = _compressor_jobs.Extent(
    names=("none", "topk", "powersgd"),
    buckets=((torch.Size([40, 50]),), (torch.Size([20, 10]),) * 10),
    error_elements=1 << 16,
    repeats=2,
    members=2,
    configurations=((1, "default"), (1, "kept")),
)
MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gradients, "TRAINING_STEPS", 10)


@pytest.mark.parametrize(
    ("call", "floats"),
    [
        (lambda x: x.clone(), 1.0),
        (lambda x: x.abs() + 1.0, 2.0),
        (lambda x: x.add(1.0).sum(), 1.0),
        (lambda x: x.half(), 0.5),
        (lambda x: x.mul_(1.0), 0.0),
        # Pairs of value and index in a vector that torch's own accounting does not see.
        (lambda x: torch.topk(x, 100), 4.0),
    ],
)
def test_peak_memory_of_known_operations(
    call: Callable[[torch.Tensor], object], floats: float
) -> None:
    x = torch.ones(8 * MEGABYTE)
    assert peak_extra_bytes(lambda: call(x)) == pytest.approx(floats * x.nbytes, abs=MEGABYTE)


def test_a_ladder_is_thinned_and_every_word_is_tried() -> None:
    chosen = _compressor_jobs.members(PowerSgd, 3)
    assert chosen[:3] == [PowerSgd.ladder()[i] for i in (0, 2, 5)]
    assert PowerSgd(orthogonalisation="gram_schmidt") in chosen
    assert len(set(chosen)) == len(chosen)
    assert _compressor_jobs.members(TopK, 9) == list(TopK.ladder())
    for name, settings in _compressor_jobs.ASIDE.items():
        found = _compressor_jobs.members(COMPRESSORS.get(name), 2)
        assert sum(settings.items() <= vars(one).items() for one in found) == 1


@pytest.mark.parametrize("name", COMPRESSORS.names())
def test_a_replay_is_rank_0_of_the_second_step(name: str) -> None:
    compressor = COMPRESSORS.get(name).ladder()[0]
    grads = _gradients.heavy_tailed(2000, 3, 0)
    shapes = (torch.Size([40, 50]),)
    option = option_of(compressor, compressor.collectives[0])
    memories = None
    for number in range(2):
        step = virtual_step(
            option, grads, step=number, shapes=shapes, compressor=compressor, memories=memories
        )
        memories = step.memories
    rehearsal = rehearse(compressor, grads, shapes)
    for _ in range(2):  # a replay leaves no trace
        estimate, compress, decompress = rehearsal.run(grads[0].clone(), torch.empty(2000))
        assert torch.equal(estimate.mean, step.mean)
        assert compress > 0.0
        assert decompress > 0.0
    assert rehearsal.wire_bytes == sum(wire.bytes for wire in step.wire)


def test_gradients_are_what_they_are_called() -> None:
    local = _gradients.chunk_local(1 << 16, 2, 0)[0].view(-1, _gradients.CHUNK)
    inner = local.std(1)
    assert inner.log().std() == pytest.approx(_gradients.CHUNK_SIGMA, rel=0.15)
    tail = _gradients.heavy_tailed(1 << 16, 1, 0)[0]
    assert tail.pow(4).mean() / tail.square().mean() ** 2 > 10.0
    grads, shapes = _gradients.recorded(1 << 16, 2, 0)
    assert sum(shape.numel() for shape in shapes) == grads[0].numel()
    assert not torch.equal(grads[0], grads[1])
    assert torch.cosine_similarity(grads[0], grads[1], dim=0) > 0.0


def test_errors_of_those_that_are_known() -> None:
    rows = {(r["what"], r["data"]): r["vnmse"] for r in _compressor_jobs.errors(TINY)}
    for data in ("gaussian", "chunk-local", "model"):
        assert rows["none", data] < 1e-12
        assert 1e-9 < rows["torch fp16_compress_hook arithmetic", data] < 1e-5
        assert rows["topk 10%", data] < rows["topk 0.1%", data] <= 1.0


def in_this_process(heap: str, threads: int, job: Any, extent: Any) -> Any:
    return job(extent)


def test_it_writes_a_well_formed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compressors, "_in_a_process", in_this_process)
    monkeypatch.setattr(compressors, "full", lambda names: TINY)
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    assert compressors.main([]) == 0
    document = json.loads((tmp_path / "compressors.json").read_text(encoding="utf-8"))
    assert results_file.check(document) == []
    kinds = {row["kind"] for row in document["rows"]}
    assert {"time", "memory", "error"} <= kinds
    text = capsys.readouterr().out
    for one in document["verdicts"]:
        assert f"{one['name']} {one['target']}: {one['measured']}" in text
    names = " ".join(one["name"] for one in document["verdicts"])
    assert "rank=4,step=full] on 40x50, compress and decompress / copy" in names
    assert "none, peak extra memory / bucket" in names


def timed(compressor: str, compress: float, decompress: float = 0.0, **fields: Any) -> Any:
    row: dict[str, Any] = {
        "kind": "time",
        "what": compressor,
        "compressor": compressor,
        "settings": [],
    }
    row |= {"elements": 1000, "matrices": "1x1", "wire_bytes": 80, "threads": 1, "heap": "kept"}
    return {**row, "compress_ms": compress, "decompress_ms": decompress, **fields}


def held(what: str, buckets: float, *, ladder: bool = True) -> dict[str, Any]:
    row = {"kind": "memory", "what": what, "peak_extra_buckets": buckets, "ladder": ladder}
    return {**row, "compressor": what[0]}


def test_verdicts_by_hand() -> None:
    rows = [
        timed("", 2.0, what=_baselines.COPY),
        timed("", 1.0, what=_baselines.SUM_OF_SQUARES),
        timed("", 90.0, what="torch.topk 1%"),
        timed("", 900.0, what="torch.topk 10%", wire_bytes=800),
        timed("mstopk", 31.0, 5.0),
        timed("mstopk", 1.0, wire_bytes=800),  # of another ratio
        timed("threshold", 30.0, 500.0),
        timed("topkc", 2.0, 50.0),
        timed("int8", 6.0, 4.0),
        timed("powersgd", 6.0, 5.0, settings=["rank=4", "step=full"]),
        timed("powersgd", 600.0, 5.0, settings=["rank=16", "step=full"]),
        timed("thc", 30.0, 30.0, settings=["bits=4", "stages=31"]),
        timed("thc", 10.0, 9.0, settings=["bits=4", "stages=10"]),
        timed("thc", 1.0, 1.0, settings=["bits=8", "stages=10"]),
        held("a", 1.0),
        held("a 2", 2.01),
        held("b", 2.0),
        held("b aside", 7.0, ladder=False),
        held("copy", 9.0, ladder=False),
    ]
    found = [(v["name"].split(",")[0], v["measured"], v["holds"]) for v in verdicts(rows)]
    assert found == [
        ("torch.topk 1% / mstopk", 2.9, False),
        ("torch.topk 1% / threshold", 3.0, True),
        ("topkc", 2.0, True),
        ("int8 on 1x1", 5.0, True),
        ("powersgd on 1x1", 5.5, False),
        ("thc rotated whole / thc", 3.16, True),
        ("a 2", 2.01, False),
        ("b", 2.0, True),
    ]


def test_hivemind_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hivemind", None)
    (problem,) = _baselines.missing()
    assert problem.startswith("hivemind is not importable: ")
    assert not any(one.name.startswith("hivemind") for one in _baselines.baselines(10, 2))

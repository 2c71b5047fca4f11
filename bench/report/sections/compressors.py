"""What compressors cost: time, bytes, memory and error of one member of each ladder."""

from __future__ import annotations

from collections.abc import Mapping

from bench.report.results import Result, Row, table
from bench.report.section import Section

TEXT = """
Every compressor at its ladder, with one thread and two, under the default heap and under one that
is kept (`MALLOC_` settings of glibc; fresh memory costs page faults). One rank of four is timed,
with the replies of a real exchange; {elements} fp32 elements, {megabytes} MB. Below are one
member of each, one thread, default heap, medians: milliseconds without communication (compress,
decompress, make the residual), megabytes that a rank hands in, the peak of memory in units of the
bucket beside the gradient and the place of the mean (the replies of four ranks included; under a
heap that keeps nothing, so that only what is in use counts), and the error of the mean of four
ranks relative to the true mean (vNMSE, without error feedback) on three kinds of gradients;
*model* is recorded from a network in training.

{members}

In the same run a copy took {copy} ms, to fresh memory {fresh} ms, a sum of squares {squares} ms,
`torch.topk` at 1 % {topk} ms, and the arithmetic of PyTorch's fp16 hook {hook} ms. {missing}

With one thread, ratios that are targets:

{ratios}

Extra memory is at most {most_memory} buckets at every member of the {ladders} ladders. What a
compressor sent is decoded piece by piece while the residual is made, so that no dense copy of it
exists; the column *residual* has that time.

{targets}
"""

MEMBERS = (
    ("none", "none"),
    ("fp16", "fp16"),
    ("bf16", "bf16"),
    ("topk 1%", "topk 1%"),
    ("lwtopk 1%", "lwtopk 1%"),
    ("mstopk 1%", "mstopk 1%"),
    ("threshold, 4 rms", "threshold[threshold=4.0,unit=rms]"),
    ("sidco 1%", "sidco[0.25] 1%"),
    ("dgc 1%", "dgc[momentum=0.0,warm_up=0] 1%"),
    ("randomk 1%", "randomk[estimate=feedback,wire_dtype=fp32] 1%"),
    ("artopk star 1%", "artopk[star] 1%"),
    ("topkc 3%", "topkc[chunk=128,wire_dtype=bf16] 3%"),
    ("chunkunion 3%", "chunkunion[chunk=256,wire_dtype=bf16] 3%"),
    ("countsketch 1%", "countsketch[rows=3,width=8.0] 1%"),
    ("powersgd rank 4", "powersgd[min_saving=2.0,orthogonalisation=qr,rank=4,step=full]"),
    ("thc, 4 bits", "thc[bits=4,stages=10,wire_bits=8]"),
    ("int8 by all-reduce", "int8[block=256,exchange=all_reduce,rounding=nearest]"),
    ("qsgd, 15 levels", "qsgd[exchange=all_reduce,levels=15,norm=max,span=512]"),
    ("natural", "natural"),
    ("terngrad, clip 1.5", "terngrad[1.5]"),
    ("onebit", "onebit"),
    ("efsignsgd", "efsignsgd"),
    ("signsgd", "signsgd[all_gather]"),
)
"""What the table shows: a name for people, and the row's."""

MATRICES = "2500x4000"
DATA = ("gaussian", "chunk-local", "model")

RATIOS = (
    ("`mstopk`: times faster than `torch.topk`", r"/ mstopk 1%"),
    ("`threshold`, the same", r"/ threshold\["),
    ("`sidco`, the same", r"/ sidco\["),
    ("`thc`: rotated by blocks, times faster than whole", "^thc rotated whole"),
    ("`topkc` 3 % compresses, sums of squares", "^topkc"),
    ("`int8` compresses and decompresses, copies to fresh memory", "^int8"),
    ("`powersgd` rank 4 the same", "^powersgd.*compress and"),
)
"""What the second table shows: words, and a pattern for the verdicts."""


def places(result: Result) -> dict[str, str]:
    """Return what belongs into the text."""

    def baseline(what: str) -> float:
        return float(_time(result, what)["compress_ms"])

    hook = _time(result, "torch fp16_compress_hook arithmetic")
    memory = result.matching("peak extra memory")
    elements = _time(result, "none")["elements"]
    missing = [row["what"] for row in result.rows(kind="missing")]
    return {
        "elements": f"{elements:,}",
        "megabytes": f"{elements * 4e-6:.0f}",
        "members": _members(result),
        "copy": f"{baseline('copy in place'):.1f}",
        "fresh": f"{baseline('copy to fresh memory'):.1f}",
        "squares": f"{baseline('sum of squares'):.1f}",
        "topk": f"{baseline('torch.topk 1%'):.0f}",
        "hook": f"{hook['compress_ms']:.1f} + {hook['decompress_ms']:.1f}",
        "missing": f"Not compared: {'; '.join(missing)}." if missing else "",
        "ratios": _ratios(result),
        "most_memory": f"{max(one['measured'] for one in memory):.2f}",
        "ladders": f"{len(memory)}",
    }


def _time(result: Result, what: str) -> Row:
    """Return the times of one thread under the default heap."""
    found = result.rows(kind="time", what=what, threads=1, heap="default")
    return next(row for row in found if row.get("matrices", MATRICES) == MATRICES)


def _members(result: Result) -> str:
    cells = []
    for name, what in MEMBERS:
        time = _time(result, what)
        memory = result.row(kind="memory", what=what, matrices=MATRICES)
        errors = [result.row(kind="error", what=what, data=data)["vnmse"] for data in DATA]
        cells.append(
            (
                name,
                *(f"{time[f'{part}_ms']:.1f}" for part in ("compress", "decompress", "residual")),
                f"{1e-6 * time['wire_bytes']:.3g}",
                f"{memory['peak_extra_buckets']:.2f}",
                *(f"{error:.3g}" for error in errors),
            )
        )
    head = ("compressor", "compress", "decompress", "residual", "wire", "extra memory")
    return table((*head, "Gaussian", "chunk-local", "model"), cells)


def _ratios(result: Result) -> str:
    cells = []
    for words, pattern in RATIOS:
        found = {
            heap: result.matching(f"{pattern}.*, 1 thread, heap {heap}$")
            for heap in ("default", "kept")
        }
        target = found["default"][0]["target"]
        cells.append((words, target, _span(found["default"]), _span(found["kept"])))
    return table(("ratio", "target", "default heap", "kept heap"), cells)


def _span(verdicts: list[Row]) -> str:
    values = [one["measured"] for one in verdicts]
    least, most = min(values), max(values)
    shown = f"{least:.1f}" if len(values) == 1 else f"{least:.1f} to {most:.1f}"
    missed = [one for one in verdicts if not one["holds"]]
    return f"{shown}, missed" if missed else shown


def words(result: Result) -> Mapping[str, bool]:
    """Return what the text says in words, and whether it is so."""
    memory = result.matching("peak extra memory")
    return {"every member of the {ladders} ladders": all(one["holds"] for one in memory)}


THREADS = (
    "with two threads a copy or a sum of squares scales better than what has a serial part, and"
    ' "fresh" memory may be the heap\'s own'
)

SECTION = Section(
    position=20,
    title="What compressors cost",
    result="compressors",
    text=TEXT,
    places=places,
    given={"1": "ratio of a compressor"},
    reasons={
        "topkc.*1 thread": "it reads the gradient once, picks the leading chunks and gathers and"
        " rounds what it chose; the sum of squares only reads",
        "int8.*1 thread": "a copy to memory that is there already is fast: five do not hold the"
        " passes of decoding the codes of four ranks, or random numbers for stochastic rounding",
        "2 threads": THREADS,
    },
    words=words,
)

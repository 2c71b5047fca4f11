"""What every registered compressor costs a rank, and what it keeps of a gradient.

    python -m bench.compressors [--output json] [--quick] [--only NAME ...]

* time: 10 million fp32 elements, one rank of four alone on the processor, with the replies that a
  run of all four gave. Compressing is the work before the last collective, decompressing the work
  after it; keeping the residual is stated apart. With one thread and with two; with the C library's
  default, by which every large tensor is mapped and faulted in anew, and with a heap that is kept
  (``MALLOC_*`` of glibc), by which it is not.
* memory: peak extra memory of the same, results and replies included; see ``bench._memory``.
* error: squared error of the estimated mean over the squared norm of the true one (vNMSE), about
  10^6 elements, four ranks, no residual; the second step, since some remember what the first saw.

Each at members of its ladder and at every word of its settings, beside a copy, a sum of squares,
``torch.topk``, the arithmetic of PyTorch's fp16 hook, and hivemind's codecs where installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from bench import results_file
from bench._baselines import missing
from bench._compressor_jobs import SEED, Extent, Row, errors, memory, times
from bench._verdicts import verdicts
from gradpilot.worker_agent.compressors.base import COMPRESSORS

HEAPS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "kept": {
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "-1",
        "MALLOC_TOP_PAD_": "268435456",
    },
    "exact": {"MALLOC_MMAP_THRESHOLD_": "131072"},
}
"""Settings of glibc. ``default`` hands large tensors back when they are freed, until it has seen so
many that it keeps those of up to 32 MB; ``kept`` keeps everything from the start; ``exact`` nothing
large ever, so that what is resident is what is in use: for peaks of memory.
"""

TIMED_HEAPS = ("default", "kept")


def full(names: Sequence[str]) -> Extent:
    """Return the extent of a run whose figures are kept."""
    return Extent(
        names=tuple(names),
        buckets=((torch.Size([2500, 4000]),), (torch.Size([1000, 1000]),) * 10),
        error_elements=1 << 20,
        repeats=9,
        members=6,
        configurations=tuple((threads, heap) for threads in (1, 2) for heap in TIMED_HEAPS),
    )


def quick(names: Sequence[str]) -> Extent:
    """Return the extent of a run that only shows that all works."""
    return Extent(
        names=tuple(names),
        buckets=((torch.Size([500, 800]),), (torch.Size([200, 200]),) * 10),
        error_elements=1 << 16,
        repeats=3,
        members=2,
        configurations=((1, "default"),),
    )


def measure(extent: Extent) -> list[Row]:
    """Return all rows."""
    rows: list[Row] = [{"kind": "missing", "what": problem} for problem in missing()]
    print("errors and memory", file=sys.stderr, flush=True)
    rows += _in_a_process("default", os.cpu_count() or 1, errors, extent)
    rows += _in_a_process("exact", 1, memory, extent)
    for threads, heap in extent.configurations:
        print(f"times, {threads} thread(s), heap {heap}", file=sys.stderr, flush=True)
        for row in _in_a_process(heap, threads, times, extent):
            rows.append({**row, "threads": threads, "heap": heap})
    return rows


def _in_a_process(
    heap: str, threads: int, job: Callable[[Extent], list[Row]], extent: Extent
) -> list[Row]:
    """Run a job in a process of its own, since glibc reads its settings when a process starts."""
    before = {name: os.environ.get(name) for name in HEAPS["kept"]}
    os.environ.update(HEAPS[heap])
    try:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            1, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,)
        ) as pool:
            return pool.submit(job, extent).result()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--quick", action="store_true", help="small and short, no result file")
    parser.add_argument(
        "--only", nargs="+", choices=COMPRESSORS.names(), help="these only, no result file"
    )
    arguments = parser.parse_args(argv)
    names = arguments.only or COMPRESSORS.names()
    rows = measure((quick if arguments.quick else full)(names))
    document = {"rows": rows, "verdicts": verdicts(rows)}
    if not (arguments.quick or arguments.only):
        path = results_file.write(
            "compressors",
            "python -m bench.compressors",
            [SEED],
            rows,
            document["verdicts"],
        )
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    print(json.dumps(document, indent=1) if arguments.output == "json" else _text(document))
    return 0


def _text(document: Mapping[str, Sequence[Row]]) -> str:
    rows = document["rows"]
    lines = [row["what"] for row in rows if row["kind"] == "missing"]
    lines.append(f"{'ms':>9} {'decompr.':>9} {'residual':>9} {'MB sent':>9}  time of")
    lines += [
        f"{row['compress_ms']:9.2f} {row['decompress_ms']:9.2f} {row['residual_ms']:9.2f}"
        f" {row['wire_bytes'] / 1e6:9.3f}  {row['what']} {row.get('matrices', '')}"
        f" ({row['threads']} threads, heap {row['heap']})"
        for row in rows
        if row["kind"] == "time"
    ]
    lines.append("  buckets  peak extra memory of")
    lines += [
        f"{row['peak_extra_buckets']:9.2f}  {row['what']} {row.get('matrices', '')}"
        for row in rows
        if row["kind"] == "memory"
    ]
    lines.append("    vNMSE      bits  error of")
    lines += [
        f"{row['vnmse']:9.3g} {row['bits']:9.3f}  {row['what']} on {row['data']}"
        for row in rows
        if row["kind"] == "error"
    ]
    lines += [
        f"{'holds' if v['holds'] else 'DOES NOT HOLD'}: {v['name']} {v['target']}: {v['measured']}"
        for v in document["verdicts"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

"""What being managed costs when there is nothing to gain, and what our ring costs.

    python -m bench.overhead [--output json] [--quick]

* managed: the same model trained plainly, under PyTorch's own Python hook that does nothing but
  all-reduce, and under a dense plan, in alternating blocks of steps of one run, so that all meet
  the same machine. The ratio of a block is that of its median step times. A hook costs a fixed
  time a bucket, whatever the step, so there are two batch sizes: a step of hardly more than
  communication, and one of the length that training has.
* ring: one all-reduce of a payload by the backend and by our ring with no step skipped,
  alternating.

All over loopback with gloo, one thread a rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from bench import results_file
from gradpilot.protos.messages import Option
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.collectives.base import AllReduce
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.handle import Handle, close_all
from gradpilot.worker_agent.teardown import leave_process_group
from gradpilot.worker_agent.wire import Wire

SEED = 0
WIDTH, LAYERS = 512, 8
BATCHES = (64, 1024)
BUCKET_MB = 2.0
BLOCK_STEPS = {64: 12, 1024: 5}
WARM_UP_STEPS = 24
RING_MB = (1, 4, 16)
TIMEOUT_SECONDS = 900.0


def _model() -> nn.Module:
    torch.manual_seed(SEED)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


class _Job:
    """One copy of the model in training."""

    def __init__(self, rank: int, batch: int, controller: str | None) -> None:
        self._net = DistributedDataParallel(_model(), bucket_cap_mb=BUCKET_MB)
        self.handle: Handle | None = None
        if controller is not None:
            policy = "fixed" if controller == "" else None
            self.handle = attach(
                self._net,
                controller=controller or None,
                policy=policy,
                name=f"m{batch}-{bool(controller)}",
            )
        self._optimizer = torch.optim.SGD(self._net.parameters(), lr=0.01, momentum=0.9)
        self._data = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(rank))

    def register(self, hook: Callable[..., Any]) -> None:
        """Give the model a communication hook that is not ours."""
        self._net.register_comm_hook(None, hook)

    def steps(self, count: int) -> list[float]:
        """Return the seconds of so many steps."""
        seconds = []
        dist.barrier()
        for _ in range(count):
            begun = time.perf_counter()
            self._optimizer.zero_grad()
            self._net(self._data).square().mean().backward()
            self._optimizer.step()
            seconds.append(time.perf_counter() - begun)
        return seconds


def _managed(rank: int, blocks: int) -> list[dict[str, Any]]:
    rows = []
    for batch, (label, controller) in itertools.product(
        BATCHES, (("none", "off"), ("embedded", ""))
    ):
        plain, hooked = _Job(rank, batch, None), _Job(rank, batch, None)
        managed = _Job(rank, batch, controller)
        hooked.register(allreduce_hook)
        jobs = {"plain": plain, "torch's allreduce_hook": hooked, "managed dense": managed}
        for job in jobs.values():
            job.steps(WARM_UP_STEPS)
        medians: dict[str, list[float]] = {name: [] for name in jobs}
        for block in range(blocks):
            names = list(jobs)
            turn = block % len(names)
            for name in names[turn:] + names[:turn]:
                medians[name].append(statistics.median(jobs[name].steps(BLOCK_STEPS[batch])))
        assert managed.handle is not None
        assert managed.handle.layout is not None
        rows += [
            {
                "case": f"{name} / plain",
                "controller": label,
                "batch": batch,
                "ranks": dist.get_world_size(),
                "buckets": len(managed.handle.layout.buckets),
                "elements": managed.handle.layout.elements,
                "blocks": blocks,
                "plain_step_ms": round(1e3 * statistics.median(medians["plain"]), 3),
                **_spread([a / b for a, b in zip(medians[name], medians["plain"], strict=True)]),
            }
            for name in list(jobs)[1:]
        ]
        managed.handle.detach()
    return rows


def _all_reduce(payload: torch.Tensor) -> Rounds:
    total = yield AllReduce(payload)
    return Estimate(total, None)


def _ring(rank: int, repeats: int) -> list[dict[str, Any]]:
    assert dist.group.WORLD is not None
    wire = Wire(dist.group.WORLD)
    at = At(rank=rank, world_size=wire.world_size, step=0)

    def timed(option: Option, payload: torch.Tensor) -> float:
        dist.barrier()
        begun = time.perf_counter()
        wire.run(_all_reduce(payload), option, at)
        return time.perf_counter() - begun

    rows = []
    for megabytes in RING_MB:
        payload = torch.ones(megabytes * 250_000)
        pairs: list[tuple[float, float]] = []
        for repeat in range(repeats + 2):
            options = [Option(), Option(collective="ring")]
            if repeat % 2:
                options.reverse()
            seconds = {option.collective: timed(option, payload) for option in options}
            payload.fill_(1.0)
            if repeat >= 2:
                pairs.append((seconds["native"], seconds["ring"]))
        rows.append(
            {
                "case": "ring S=0 / native all-reduce",
                "megabytes": megabytes,
                "ranks": wire.world_size,
                "repeats": repeats,
                "native_ms": round(1e3 * statistics.median(n for n, _ in pairs), 3),
                **_spread([ring / native for native, ring in pairs]),
            }
        )
    return rows


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    deciles = statistics.quantiles(ratios, n=10)
    return {
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_p10": round(deciles[0], 4),
        "ratio_p90": round(deciles[-1], 4),
    }


def _rank_main(
    target: Callable[[int, int], Any],
    count: int,
    rank: int,
    world_size: int,
    port: int,
    queue: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    store = TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    rows = target(rank, count)
    close_all()
    leave_process_group()
    if rank == 0:
        queue.put(rows)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _on_ranks(target: Callable[[int, int], Any], world_size: int, count: int) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = _free_port()
    processes = [
        context.Process(target=_rank_main, args=(target, count, rank, world_size, port, queue))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        rows: list[Any] = queue.get(timeout=TIMEOUT_SECONDS)
        for process in processes:
            process.join(30)
            if process.exitcode != 0:
                raise RuntimeError(f"a rank ended with exit code {process.exitcode}")
        return rows
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--quick", action="store_true", help="few repetitions, no result file")
    arguments = parser.parse_args(argv)
    blocks, repeats = (4, 8) if arguments.quick else (60, 60)

    rows = _on_ranks(_managed, 2, blocks)
    for world_size in (2, 4):
        rows += _on_ranks(_ring, world_size, repeats)
    verdicts = [
        results_file.verdict(
            f"managed dense plan / plain DDP, controller {row['controller']},"
            f" step of {row['plain_step_ms']:.0f} ms, median ratio",
            f"<= {limit}",
            row["ratio_median"],
            row["ratio_median"] <= limit,
        )
        for row in rows
        if row["case"].startswith("managed")
        for limit in (1.03, 1.01)
    ]
    document = {"rows": rows, "verdicts": verdicts}
    if not arguments.quick:
        path = results_file.write("overhead", "python -m bench.overhead", [SEED], rows, verdicts)
        document = json.loads(Path(path).read_text())
    print(json.dumps(document, indent=1) if arguments.output == "json" else _text(rows, verdicts))
    return 0


def _text(rows: Sequence[Any], verdicts: Sequence[Any]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in row.items()) for row in rows]
    return "\n".join([*lines, *results_file.judged(verdicts)])


if __name__ == "__main__":
    raise SystemExit(main())

"""What the agent costs a rank beside its steps: processor time of its threads, and memory.

    python -m bench.agent_cost [--output json] [--quick]

Two ranks over gloo on loopback, a small model of four buckets, a controller that is there all the
time, and a pace of 100 steps a second.

* cpu: three copies of the model take turns in blocks of steps: plain DDP, DDP under PyTorch's own
  Python hook that does nothing but all-reduce, and under gradpilot with a dense plan. Of each, the
  time of every thread by the kernel's clocks: the agent's own, the one that trains and runs the
  hook, and gloo's.
* memory: the resident set while an operator pins one option after another, so that the plan changes
  100 times in 2,000 steps. Every option comes round many times, so what each keeps is there before
  the last half begins.

Shares are of one core. Settings are the defaults, except the decision step while memory is
watched.
"""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import json
import multiprocessing
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from bench import results_file
from gradpilot.operate import OperatorClient
from gradpilot.protos.messages import BF16, DENSE, Option, Setting
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.handle import Handle, close_all
from gradpilot.worker_agent.teardown import leave_process_group

SEED = 0
RANKS = 2
PACE_SECONDS = 0.01
WIDTH, LAYERS, BUCKET_MB = 64, 4, 0.016
BLOCK_STEPS = 250
RUN = "agent-cost"
SWITCHES = 100
STEPS_A_SWITCH = 20
INTERVAL = 10
"""Decision step while memory is watched: every second one brings a switch."""
OPTIONS = (
    DENSE,
    Option("topk", 0.1, "allgather"),
    BF16,
    Option("artopk", 0.2, "native", settings=(Setting("selection", "star"),)),
    Option("topk", 0.01, "allgather"),
)
CPU_LIMIT = 0.02
GROWTH_LIMIT_MB = 1.0
TIMEOUT_SECONDS = 300.0

PLAIN, HOOKED, MANAGED = "plain DDP", "torch's allreduce_hook", "managed, dense plan"
WATCHER, ALL, PACE = "watcher (a process)", "the agent's together", "steps/s"

_OF_GRPC = ("event_engine", "grpc", "lifeguard", "timer_manager", "resolver")
"""Beginnings of the names that gRPC's threads in C++ have in the kernel."""


def _threads() -> dict[str, float]:
    """Return the processor seconds of this process by what its threads do.

    Those of the agent have names of their own and are there as long as it is; ``main`` also runs
    the hook, since CPU tensors go backward in the thread that asks for it.
    """
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().native_id
    found: dict[str, float] = collections.defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        number = int(task.name)
        try:
            name = named.get(number, "") or (task / "comm").read_text().strip()
            nanoseconds = int((task / "schedstat").read_text().split()[0])
        except OSError:  # it ended just now
            continue
        if number == main:
            name = "main"
        elif not name.startswith("gradpilot"):
            ours = number in named or name.startswith(_OF_GRPC)
            name = "grpc" if ours else "gloo" if "gloo" in name else "other"
        found[name] += 1e-9 * nanoseconds
    return found


def _process_seconds(pid: int) -> float:
    """Return the processor seconds of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watcher_of(handle: Handle) -> int:
    """Return the process id of a rank's watcher."""
    if handle._watchdog is None:
        raise RuntimeError("expected a watcher, got none; leave GRADPILOT_WATCHDOG_SECONDS unset")
    return handle._watchdog.pid


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Job:
    """One copy of the model, stepped at the pace.

    Args:
        rank: Whose data it trains on.
    """

    def __init__(self, rank: int) -> None:
        torch.manual_seed(SEED)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.net = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=BUCKET_MB)
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self._data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))

    def steps(self, count: int) -> float:
        """Make so many steps; return the wall-clock seconds."""
        begun = due = time.monotonic()
        for _ in range(count):
            self._optimizer.zero_grad()
            self.net(self._data).square().mean().backward()
            self._optimizer.step()
            due += PACE_SECONDS
            time.sleep(max(due - time.monotonic(), 0.0))
        return time.monotonic() - begun


def turn(job: Job, steps: int, watcher: int) -> dict[str, float]:
    """Make so many steps; return the share of a core that each kind of thread took meanwhile.

    Args:
        job: Whose steps.
        steps: How many.
        watcher: Process id of the agent's watcher.
    """
    before = {**_threads(), WATCHER: _process_seconds(watcher)}
    seconds = job.steps(steps)
    after = {**_threads(), WATCHER: _process_seconds(watcher)}
    spent = {thread: (after[thread] - before.get(thread, 0.0)) / seconds for thread in after}
    agents = [share for thread, share in spent.items() if thread not in ("main", "gloo", "other")]
    return {**spent, ALL: sum(agents), PACE: steps / seconds}


def cpu(rank: int, job: Job, handle: Handle, blocks: int) -> list[dict[str, Any]]:
    """Return what each thread took while the three copies took turns."""
    plain, hooked = Job(rank), Job(rank)
    hooked.net.register_comm_hook(None, allreduce_hook)
    jobs = {PLAIN: plain, HOOKED: hooked, MANAGED: job}
    shares: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    rates = []
    for each in jobs.values():
        each.steps(BLOCK_STEPS // 5)
    for block, index in itertools.product(range(blocks), range(len(jobs))):
        name = list(jobs)[(block + index) % len(jobs)]
        taken = turn(jobs[name], BLOCK_STEPS, watcher_of(handle))
        rates.append(taken.pop(PACE))
        for thread, share in taken.items():
            shares[name, thread].append(share)
    return [
        {
            "case": "cpu",
            "rank": rank,
            "steps": name,
            "thread": thread,
            "steps_per_s": round(statistics.median(rates), 1),
            "share_mean": round(statistics.mean(found), 5),
            "share_median": round(statistics.median(found), 5),
        }
        for (name, thread), found in sorted(shares.items())
    ]


def memory(rank: int, job: Job, handle: Handle, switches: int) -> list[dict[str, Any]]:
    """Step until the plan has changed so often; all ranks see the changes at the same steps."""
    limit = 4 * switches * STEPS_A_SWITCH
    first, switched = handle.step, handle.counters.switches
    steps = np.zeros(limit)
    resident = np.zeros(limit)
    taken = 0
    gc.collect()
    while taken < limit and (
        handle.counters.switches - switched < switches
        or handle.step - first < switches * STEPS_A_SWITCH
    ):
        job.steps(INTERVAL)
        steps[taken], resident[taken] = handle.step - first, _resident_mb()
        taken += 1
    half = steps[:taken] >= steps[taken - 1] / 2
    x, y = steps[:taken][half], resident[:taken][half]
    slope = float(np.polyfit(x, y, 1)[0])
    quarter = max(len(y) // 4, 1)
    growth = float(np.median(y[-quarter:]) - np.median(y[:quarter]))
    return [
        {
            "case": "memory",
            "rank": rank,
            "steps": int(steps[taken - 1]),
            "switches": handle.counters.switches - switched,
            "resident_mb_first": round(float(resident[0]), 2),
            "resident_mb_half": round(float(y[0]), 2),
            "resident_mb_last": round(float(y[-1]), 2),
            "last_half_slope_kb_per_step": round(1e3 * slope, 4),
            "last_half_growth_mb": round(growth, 3),
            "frozen": handle.frozen,
        }
    ]


def _rank_main(
    rank: int, port: int, blocks: int, switches: int, queue: Any, ended: Any, released: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    store = TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    rows = _measure(rank, blocks, switches, queue)
    ended.set()
    released.wait(TIMEOUT_SECONDS)  # until the operator has stopped
    close_all()
    leave_process_group()
    queue.put(rows)


def _measure(rank: int, blocks: int, switches: int, queue: Any) -> list[dict[str, Any]]:
    job = Job(rank)
    handle = attach(job.net, run=RUN, name="cpu", policy="fixed")
    rows = cpu(rank, job, handle, blocks)
    handle.detach()
    os.environ["GRADPILOT_CTL_MIN_DECISION_SECONDS"] = "3600"  # the operator decides
    os.environ["GRADPILOT_CTL_POLICY_SETTINGS__INTERVAL"] = str(INTERVAL)
    job = Job(rank)
    handle = attach(job.net, run=RUN, policy="fixed")
    if rank == 0:
        queue.put(handle.controller)  # from now on options are pinned
    return rows + memory(rank, job, handle, switches)


def pin(address: str, over: Callable[[], bool]) -> None:
    """Pin the next option every ``STEPS_A_SWITCH`` steps.

    Args:
        address: Of the controller.
        over: Whether the job has had enough.
    """
    options: Iterator[Option] = itertools.cycle((*OPTIONS[1:], OPTIONS[0]))
    with OperatorClient(address) as client:
        due = time.monotonic()
        while not over():
            client.pin(RUN, "model", next(options))
            due += STEPS_A_SWITCH * PACE_SECONDS
            time.sleep(max(due - time.monotonic(), 0.0))


def measure(blocks: int, switches: int) -> list[dict[str, Any]]:
    """Return the rows of all ranks.

    Args:
        blocks: Blocks of ``BLOCK_STEPS`` steps for each of the three copies of the model.
        switches: Changes of the plan while memory is watched, ``STEPS_A_SWITCH`` steps apart.

    Raises:
        RuntimeError: A rank failed.
    """
    context = multiprocessing.get_context("spawn")
    queue, ended, released = context.Queue(), context.Event(), context.Event()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    processes = [
        context.Process(
            target=_rank_main, args=(rank, port, blocks, switches, queue, ended, released)
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        pin(queue.get(timeout=TIMEOUT_SECONDS), ended.is_set)
        released.set()
        rows = [row for _ in range(RANKS) for row in queue.get(timeout=TIMEOUT_SECONDS)]
        for process in processes:
            process.join(30)
            if process.exitcode != 0:
                raise RuntimeError(f"a rank ended with exit code {process.exitcode}")
        return sorted(rows, key=lambda row: (row["case"], row["rank"]))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the verdicts: the worst rank counts."""
    shares = {(r["rank"], r["steps"], r["thread"]): r for r in rows if r["case"] == "cpu"}
    share = max(shares[rank, MANAGED, ALL]["share_mean"] for rank in range(RANKS))
    pace = min(row["steps_per_s"] for row in shares.values())
    beyond = {
        other: max(
            shares[rank, MANAGED, "main"]["share_median"]
            - shares[rank, other, "main"]["share_median"]
            for rank in range(RANKS)
        )
        for other in (PLAIN, HOOKED)
    }
    watched = [row for row in rows if row["case"] == "memory"]
    growth = max(row["last_half_growth_mb"] for row in watched)
    switched, steps = (min(row[key] for row in watched) for key in ("switches", "steps"))
    verdict = results_file.verdict
    return [
        verdict(
            f"the agent's threads and watcher at {pace:.0f} steps/s, share of a core",
            f"< {CPU_LIMIT}",
            share,
            share < CPU_LIMIT and pace > 0.95 / PACE_SECONDS,
        ),
        *(
            verdict(
                f"training thread at {pace:.0f} steps/s, managed beyond {other}, share of a core",
                f"< {CPU_LIMIT}",
                round(more, 5),
                more < CPU_LIMIT,
            )
            for other, more in beyond.items()
        ),
        verdict(
            f"growth of the resident set in the last half of {steps} steps with {switched}"
            " switches, MB",
            f"< {GROWTH_LIMIT_MB:g}",
            growth,
            growth < GROWTH_LIMIT_MB and not any(row["frozen"] for row in watched),
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--quick", action="store_true", help="a tenth of it, no result file")
    arguments = parser.parse_args(argv)
    rows = measure(1, SWITCHES // 10) if arguments.quick else measure(6, SWITCHES)
    verdicts = judge(rows)
    document: dict[str, Any] = {"rows": rows, "verdicts": verdicts}
    if not arguments.quick:
        command = "python -m bench.agent_cost"
        path = results_file.write("agent_cost", command, [SEED], rows, verdicts)
        document = json.loads(path.read_text(encoding="utf-8"))
    print(json.dumps(document, indent=1) if arguments.output == "json" else _text(rows, verdicts))
    return 0


def _text(rows: Sequence[Any], verdicts: Sequence[Any]) -> str:
    lines = [", ".join(f"{name} {value}" for name, value in row.items()) for row in rows]
    return "\n".join([*lines, *results_file.judged(verdicts)])


if __name__ == "__main__":
    raise SystemExit(main())

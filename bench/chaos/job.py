"""The job that is disturbed: a small DDP model that notes, step for step, what it did."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from gradpilot.protos.jsoncodec import to_json
from gradpilot.protos.messages import Plan
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.handle import close_all
from gradpilot.worker_agent.teardown import leave_process_group

RUN = "chaos"
WIDTH = 32
PAUSE_SECONDS = 0.001
STOP_EVERY = 10
STALL_SECONDS = 10.0

_ENTRY = struct.Struct("<qqqIII")


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of one rank.

    Attributes:
        step: Its number.
        term: Term of the plan that was carried out.
        plan: Its id.
        content: Check sum of the whole plan: the safe plan has the id of the one that it replaces.
        option: Check sum of the label of the plan's first option.
        parameters: Check sum of all parameters after the step.
    """

    step: int
    term: int
    plan: int
    content: int
    option: int
    parameters: int


def check_sum(text: str) -> int:
    """Return the number that stands for a text in an entry."""
    return zlib.crc32(text.encode())


def log_path(folder: Path, rank: int) -> Path:
    """Return where a rank notes its steps."""
    return folder / f"steps.{rank}"


def entries(data: bytes) -> list[Entry]:
    """Return the whole entries at the beginning of ``data``."""
    whole = len(data) - len(data) % _ENTRY.size
    return [Entry(*values) for values in _ENTRY.iter_unpack(data[:whole])]


def size_of(count: int) -> int:
    """Return the bytes of so many entries."""
    return count * _ENTRY.size


def train(rank: int, world_size: int, address: str, folder: Path) -> dict[str, Any]:
    """Train until the file ``stop`` is in the folder; the default group is there.

    Returns:
        What the agent counted.
    """
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.003)
    handle = attach(
        ddp,
        controller=address,
        run=RUN,
        control_timeout_seconds=10.0,
        watchdog_seconds=STALL_SECONDS,
        dumps=str(folder / "dumps"),
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    log = os.open(log_path(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    known: tuple[Plan, int, int] | None = None
    step = 0
    while True:
        optimizer.zero_grad()
        ddp(torch.randn(4, WIDTH, generator=generator)).square().sum().backward()
        optimizer.step()
        plan = handle.plan
        if known is None or known[0] is not plan:
            known = (plan, check_sum(to_json(plan)), check_sum(plan.options()[0].label))
        state = 0
        for p in ddp.parameters():
            state = zlib.crc32(p.detach().numpy().tobytes(), state)
        os.write(log, _ENTRY.pack(step, *plan.key, known[1], known[2], state))
        step += 1
        if step % STOP_EVERY == 0:
            over = torch.tensor([int((folder / "stop").exists())])
            dist.broadcast(over, 0)
            if over.item():
                break
        sleep(PAUSE_SECONDS)
    os.close(log)
    counted = handle.counters
    result = {
        "steps": step,
        "frozen": handle.frozen,
        "switches": counted.switches,
        "plans_held": counted.plans_held,
        "plans_rejected": counted.plans_rejected,
    }
    handle.close()
    return result


def main(
    rank: int, world_size: int, address: str, folder: Path, env: Mapping[str, str], results: Any
) -> None:
    """Be one rank: join the group, train, put the result into the queue."""
    torch.set_num_threads(1)
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo",
        store=FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    results.put((rank, train(rank, world_size, address, folder)))
    close_all()
    leave_process_group()

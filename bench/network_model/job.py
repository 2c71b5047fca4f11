"""What every rank runs: collectives in the order that it is told, each timed.

The driver writes ``order-K.json`` and every rank answers with ``reply-K-RANK.json``. Ranks wait for
each other before every collective through a file that all of them map: they are processes of one
machine, so that costs the emulated network nothing and lets all begin within a fraction of a
millisecond. Their clock is the machine's, so times of different ranks can be compared.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gradpilot.protos.messages import Option
from gradpilot.worker_agent.collectives.base import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    ReduceScatter,
)
from gradpilot.worker_agent.collectives.scatter import NAME as SCATTER_BROADCAST
from gradpilot.worker_agent.compressors.base import At, Estimate, Rounds
from gradpilot.worker_agent.teardown import leave_process_group
from gradpilot.worker_agent.wire import Wire

GROUP_TIMEOUT = timedelta(seconds=90)
POLL_SECONDS = 0.01
BEGIN_POLL_SECONDS, END_POLL_SECONDS = 1e-4, 1e-3
"""How often a rank looks whether the others are there; while some still work it is not often."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which."""
    parser = argparse.ArgumentParser(description="One rank; see python -m bench.network_model.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="end of everything")
    parser.add_argument("--interface", required=True, help="whose bytes are counted")
    arguments = parser.parse_args(argv)
    faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        _Rank(arguments.folder, arguments.interface).serve()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit would wait for ranks that wait for this one
    leave_process_group()


class _Rank:
    def __init__(self, folder: Path, interface: str) -> None:
        assert dist.group.WORLD is not None
        self._folder, self._interface = folder, interface
        self._wire = Wire(dist.group.WORLD)
        self._rank, self._ranks = self._wire.rank, self._wire.world_size
        self._arrivals = np.memmap(folder / "arrivals", np.int64, "r+", shape=(self._ranks,))
        self._waits = 0
        self._room = torch.zeros(0)

    def serve(self) -> None:
        """Do what is ordered until the order is to end."""
        number = 0
        while True:
            path = self._folder / f"order-{number}.json"
            while not path.exists():
                time.sleep(POLL_SECONDS)
            order = json.loads(path.read_text(encoding="utf-8"))
            if order is None:
                return
            pause = order["pause"]
            gc.collect()
            gc.disable()
            done = [self._timed(kind, skip, size, pause) for kind, skip, size in order["runs"]]
            gc.enable()
            write(self._folder / f"reply-{number}-{self._rank}.json", done)
            number += 1

    def _timed(self, kind: str, skip: int, size: int, pause: float) -> list[float]:
        """Return beginning and end of a collective, seconds, and the bytes sent meanwhile."""
        if self._room.nbytes < size:
            self._room = torch.empty(-(-size // 4)).zero_()
        ask, option = request(kind, skip, self._room[: size // 4])
        at = At(rank=self._rank, world_size=self._ranks, step=self._waits)
        time.sleep(pause)  # acknowledgements of what was before
        sent = sent_bytes(self._interface)
        self._wait_for_all(BEGIN_POLL_SECONDS)
        begun = time.monotonic()
        self._wire.run(_rounds(ask), option, at)
        ended = time.monotonic()
        self._wait_for_all(END_POLL_SECONDS)  # a rank that is done may still forward
        return [begun, ended, sent_bytes(self._interface) - sent]

    def _wait_for_all(self, poll: float) -> None:
        self._waits += 1
        self._arrivals[self._rank] = self._waits
        while int(self._arrivals.min()) < self._waits:
            time.sleep(poll)


def request(kind: str, skip: int, payload: Tensor) -> tuple[Collective, Option]:
    """Return what a compressor would ask for, and the option that decides who carries it.

    Args:
        kind: One of ``messages.COLLECTIVES``.
        skip: Steps of our own all-reduce left out.
        payload: What this rank hands in.
    """
    backend: dict[str, Collective] = {
        "all_reduce": AllReduce(payload),
        "all_gather": AllGather(payload),
        "broadcast": Broadcast(payload, source=0),
        "reduce_scatter": ReduceScatter(payload),
        "all_to_all": AllToAll(payload),
    }
    if kind in backend:
        return backend[kind], Option()
    if kind == SCATTER_BROADCAST:
        return backend["broadcast"], Option(collective="ring")
    return AllReduce(payload), Option(collective=kind, skip=skip, rotation="static")


def _rounds(ask: Collective) -> Rounds:
    reply = yield ask
    return Estimate(reply, None)


def sent_bytes(interface: str) -> int:
    """Return what a network interface of this process's namespace has sent so far; 0 if unknown."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def write(path: Path, document: Any) -> None:
    """Write a JSON file that is there as a whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document), encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    main()

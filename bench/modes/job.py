"""What every rank runs: all modes one after the other, each told as soon as it is done."""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import json
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.modes.catalog import MODES, Mode
from bench.modes.copies import Copy, taking_turns
from bench.modes.models import Size
from gradpilot.worker_agent.handle import Handle, close_all
from gradpilot.worker_agent.teardown import leave_process_group

GROUP_TIMEOUT = timedelta(seconds=60)


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """What the ranks are to do.

    Attributes:
        modes: Names of modes.
        size: Of models and data.
        controller: ``host:port`` or ``off``.
        blocks: Blocks of each copy.
        block_steps: Steps of a block.
        warm_up_steps: Steps of each copy before its first block, made again until the managed one
            is under a plan of the controller.
        seconds: After so long the ranks end themselves, whatever happens.
    """

    modes: tuple[str, ...]
    size: Size
    controller: str
    blocks: int
    block_steps: int
    warm_up_steps: int
    seconds: float

    def write(self, folder: Path) -> None:
        """Put them where ranks look for them."""
        _write(folder / "orders.json", dataclasses.asdict(self))

    @staticmethod
    def read(folder: Path) -> Orders:
        """Return the orders in a folder."""
        told = json.loads((folder / "orders.json").read_text(encoding="utf-8"))
        return Orders(**{**told, "modes": tuple(told["modes"]), "size": Size(**told["size"])})


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What one rank tells of a mode.

    Attributes:
        plain: Seconds a step of every block without gradpilot.
        managed: The same under a dense plan.
        buckets: Buckets of the managed copy, all models together.
        elements: Elements in them.
        policy: Whose plan was in force at the end.
        dense: Whether all buckets were dense from beginning to end, and the agent at work.
        bit_equal: Whether both copies had the same parameters at the end.
    """

    plain: tuple[float, ...]
    managed: tuple[float, ...]
    buckets: int
    elements: int
    policy: str
    dense: bool
    bit_equal: bool

    @staticmethod
    def read(path: Path) -> Told:
        """Return what a rank told."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Told(**{**fields, **{n: tuple(fields[n]) for n in ("plain", "managed")}})


def answer(folder: Path, mode: str, rank: int) -> Path:
    """Return where a rank tells of a mode."""
    return folder / f"{mode}-{rank}.json"


def measured(name: str, orders: Orders) -> Told:
    """Measure a mode; all ranks together."""
    mode = MODES[name]
    torch._dynamo.reset()  # what was compiled for a mode before
    plain = Copy(mode, name, orders.size, None)
    managed = Copy(mode, name, orders.size, orders.controller)
    taken = taking_turns((plain, managed), orders.blocks, orders.block_steps, orders.warm_up_steps)
    handles = managed.handles
    layouts = [handle.layout for handle in handles]
    told = Told(
        plain=tuple(taken[0]),
        managed=tuple(taken[1]),
        buckets=sum(len(layout.buckets) for layout in layouts if layout is not None),
        elements=sum(layout.elements for layout in layouts if layout is not None),
        policy=handles[0].plan.policy,
        dense=all(_was_dense(handle, mode) for handle in handles),
        bit_equal=managed.same_as(plain),
    )
    for handle in handles:
        handle.close()
    return told


def _was_dense(handle: Handle, mode: Mode) -> bool:
    counters = handle.counters
    at_work = handle.step > 0 and (not handle.frozen or not mode.planned)
    return at_work and counters.wire_bytes == counters.dense_bytes > 0


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which."""
    parser = argparse.ArgumentParser(description="One rank; see python -m bench.modes.")
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args(argv).folder
    orders = Orders.read(folder)
    faulthandler.dump_traceback_later(orders.seconds, exit=True)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        for name in orders.modes:
            told = measured(name, orders)
            _write(answer(folder, name, dist.get_rank()), dataclasses.asdict(told))
            gc.collect()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit would wait for ranks that wait for this one
    close_all()
    leave_process_group()


def _write(path: Path, document: Any) -> None:
    """Write a JSON file that is there as a whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document), encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    main()

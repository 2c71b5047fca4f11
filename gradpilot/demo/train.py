"""What every rank runs: the adaptive run, then the same steps with bf16 all the way."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import os
import statistics
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradpilot.demo.data import Dataset, batches, load
from gradpilot.demo.model import BUCKET_CAP_MB, accuracy, checksum, learning_rate, make_model
from gradpilot.demo.operator import decisions
from gradpilot.demo.records import (
    KINDS,
    Accuracy,
    Checksum,
    Events,
    RankRecord,
    Settings,
    Switch,
    Taken,
    note_failure,
    read_settings,
    write_record,
)
from gradpilot.demo.wire import EmulatedWire
from gradpilot.operate import OperatorError
from gradpilot.protos.messages import BF16, RunRef
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.handle import Handle, close_all
from gradpilot.worker_agent.teardown import leave_process_group

BATCH = 64
"""Samples per rank and step."""

PEAK_RATE = {"digits": 0.1, "fashion-mnist": 0.1}

CHECK_STEPS = 20
"""Steps between two checksums of the parameters."""

EVALUATE_STEPS = 40
"""Steps between two evaluations, for which all ranks wait: on Fashion-MNIST half a second each."""

TELL_SECONDS = 0.5
"""Time between two events."""

GROUP_TIMEOUT = timedelta(seconds=60)

AGENT_SETTINGS: dict[str, Any] = {"report_seconds": 0.5, "statistics_steps": 5, "sample_block": 1}
"""Quicker than the defaults, since a phase of the demo lasts seconds: short windows, and every
collective reported."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run both trainings; started by torchrun on every rank."""
    parser = argparse.ArgumentParser(description="One rank of the demo; see `gradpilot demo`.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True, help="seconds until it gives up")
    arguments = parser.parse_args(argv)
    # The end of everything if a collective or a peer hangs, or if torchrun is gone.
    faulthandler.dump_traceback_later(arguments.deadline, exit=True)
    _end_with_parent()
    torch.set_num_threads(1)
    try:
        _run(arguments.folder)
    except BaseException as error:
        note_failure(arguments.folder, int(os.environ.get("RANK", "0")), error)
        raise
    close_all()
    leave_process_group()


def _run(folder: Path) -> None:
    settings = read_settings(folder)
    dataset = load(settings.dataset)
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    for kind in KINDS:
        write_record(folder, _Training(kind, settings, dataset, folder).run())
        dist.barrier()


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="demo-parent", daemon=True).start()


class _Training:
    """One run on one rank.

    Args:
        kind: ``adaptive``, or ``bf16`` for that option all the way and no controller.
        settings: What all ranks must know.
        dataset: What is learned.
        folder: Where rank 0 writes events.
    """

    def __init__(self, kind: str, settings: Settings, dataset: Dataset, folder: Path) -> None:
        self._kind, self._settings, self._dataset = kind, settings, dataset
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._events = Events(folder) if self._rank == 0 else None
        self._seconds: list[float] = []
        self._switches: list[Switch] = []
        self._checksums: list[Checksum] = []
        self._accuracy: list[Accuracy] = []
        self._told = 0.0

    def run(self) -> RankRecord:
        """Train and return what was seen; all ranks call it together."""
        model = make_model(self._dataset.features, self._dataset.classes, self._settings.seed)
        ddp = DistributedDataParallel(
            model, bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=True
        )
        handle = attach(
            ddp,
            controller="off" if self._kind == "bf16" else None,
            run="demo",
            seed=self._settings.seed,
            start=BF16,
            wire=functools.partial(EmulatedWire, schedule=self._settings.schedule),
            **AGENT_SETTINGS,
        )
        try:
            self._tell("attached", controller=handle.controller, run=handle.run, model=handle.model)
            dist.barrier()  # all begin together, so that no first step waits for a slow start
            self._train(ddp, handle)
            return self._record(handle)
        finally:
            handle.close()
            if self._events is not None:
                self._events.close()

    def _train(self, ddp: DistributedDataParallel, handle: Handle) -> None:
        steps, data = self._settings.schedule.steps, self._dataset
        peak = PEAK_RATE[data.name]
        optimizer = torch.optim.SGD(ddp.parameters(), lr=peak, momentum=0.9)
        loss_of = nn.CrossEntropyLoss()
        drawn = batches(data, BATCH, self._rank, self._world_size, self._settings.seed)
        for step in range(steps):
            begun = time.monotonic()
            rate = learning_rate(step, steps, peak)
            for group in optimizer.param_groups:
                group["lr"] = rate
            samples = next(drawn)
            optimizer.zero_grad()
            loss = loss_of(ddp(data.train_x[samples]), data.train_y[samples])
            loss.backward()
            optimizer.step()
            value = float(loss.detach())
            handle.observe(loss=value, lr=rate)
            self._seconds.append(time.monotonic() - begun)
            self._look(step, handle, ddp.module, value)

    def _look(self, step: int, handle: Handle, model: nn.Module, loss: float) -> None:
        """Note what the step showed; none of it counts as training time."""
        plan, last = handle.plan, step + 1 == self._settings.schedule.steps
        if not self._switches or plan.id != self._switches[-1].plan_id:
            options = tuple(option.label for option in plan.options())
            self._switches.append(Switch(step, plan.id, options))
        if last or step % CHECK_STEPS == CHECK_STEPS - 1:
            self._checksums.append(Checksum(step, checksum(model)))
        if self._rank == 0 and (last or step % EVALUATE_STEPS == EVALUATE_STEPS - 1):
            hits = accuracy(model, self._dataset.test_x, self._dataset.test_y)
            self._accuracy.append(Accuracy(step, sum(self._seconds), hits))
        if last or time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            self._tell(
                "progress",
                step=step,
                seconds=sum(self._seconds),
                step_seconds=statistics.median(self._seconds[-5:]),
                phase=self._settings.schedule.at(step).name,
                plan_id=plan.id,
                options=list(self._switches[-1].options),
                accuracy=self._accuracy[-1].accuracy if self._accuracy else None,
                loss=loss,
            )

    def _record(self, handle: Handle) -> RankRecord:
        layout, counters = handle.layout, handle.counters
        assert layout is not None
        return RankRecord(
            kind=self._kind,
            rank=self._rank,
            world_size=self._world_size,
            step_seconds=tuple(self._seconds),
            switches=tuple(self._switches),
            checksums=tuple(self._checksums),
            accuracy=tuple(self._accuracy),
            elements=tuple(bucket.elements for bucket in layout.buckets),
            emulated=EmulatedWire.emulated,
            agreed=counters.switches,
            nonfinite=counters.nonfinite_steps,
            decisions=self._decisions(handle),
        )

    def _decisions(self, handle: Handle) -> tuple[Taken, ...]:
        """Ask for them before the embedded controller ends with the handle."""
        if self._rank != 0 or not handle.controller:
            return ()
        with contextlib.suppress(OperatorError):
            return tuple(decisions(handle.controller, RunRef(handle.run, handle.model)))
        return ()

    def _tell(self, event: str, **fields: object) -> None:
        if self._events is not None:
            self._events.write(event, kind=self._kind, **fields)


if __name__ == "__main__":
    main()

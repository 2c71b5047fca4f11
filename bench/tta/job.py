"""What every rank runs, on a host of its own: one training, or a sweep over options.

The clock begins when all ranks have wrapped their model and attached, and stands still for nothing.
Evaluation would hold it up, so a rank keeps a copy of the parameters (every rank every N-th time)
and evaluates when all steps are done.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.tta import checks
from bench.tta.carrier import Carrier
from bench.tta.methods import BUCKET_MB, METHODS
from bench.tta.records import (
    GO,
    READY,
    TRAINED,
    Check,
    Evaluation,
    InForce,
    RankRecord,
    Settings,
    read_settings,
    signal,
    write_record,
)
from bench.tta.tasks import TASKS, Batch, evaluations, loss_of
from gradpilot.worker_agent.handle import close_all
from gradpilot.worker_agent.teardown import leave_process_group

GROUP_TIMEOUT = timedelta(seconds=90)

SWEEP_STEPS, SWEEP_SETTLED = 14, 4
"""Steps under an option of a sweep, and how many of them do not count."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank; RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which."""
    parser = argparse.ArgumentParser(description="One rank of a row; see python -m bench.tta.")
    parser.add_argument("--folder", type=Path, required=True)
    folder: Path = parser.parse_args(argv).folder
    settings = read_settings(folder)
    # The end of everything if a collective or a peer hangs.
    faulthandler.dump_traceback_later(settings.deadline, exit=True)
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        record = sweep(settings) if settings.sweep else _Training(settings, folder).run()
        write_record(folder, record)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit would wait for ranks that wait for this one
    close_all()
    leave_process_group()


class _Training:
    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._task = TASKS[settings.task]
        self._method = METHODS[settings.method]
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._slower = settings.last_seconds if self._rank == self._ranks - 1 else 0.0
        self._ends: list[float] = []
        self._losses: list[float] = []
        self._plans: list[InForce] = []
        self._checks: list[Check] = []
        self._kept: list[tuple[int, dict[str, Tensor]]] = []

    def run(self) -> RankRecord:
        """Train, then evaluate, and return what was seen; all ranks call it together."""
        batches = self._task.batches(self._settings.seed, self._rank, self._ranks)
        first = next(batches)  # reads the data, which is not what is measured
        ddp = DistributedDataParallel(
            self._task.model(self._settings.seed),
            bucket_cap_mb=self._method.bucket_mb,
            gradient_as_bucket_view=True,
        )
        begun = time.monotonic()
        carrier = Carrier(
            self._method,
            ddp,
            self._ranks,
            self._settings.controller,
            self._settings.seed,
            self._settings.pins[0].option if self._settings.pins else None,
        )
        attached = time.monotonic() - begun
        self._wait()
        try:
            self._train(ddp, carrier, first, batches)
            dist.barrier()
            if self._rank == 0:
                signal(self._folder, TRAINED, seconds=self._ends[-1])
            decided = carrier.decided() if self._rank == 0 else ()
            return RankRecord(
                rank=self._rank,
                attach_seconds=attached,
                ends=tuple(self._ends),
                losses=tuple(self._losses),
                evaluations=self._evaluate(ddp.module),
                plans=tuple(self._plans),
                checks=tuple(self._checks),
                decisions=decided,
                **carrier.counts(),
            )
        finally:
            carrier.close()

    def _wait(self) -> None:
        """Return on all ranks when the network has begun its schedule."""
        dist.barrier()
        if self._rank == 0:
            signal(self._folder, READY)
            while not (self._folder / GO).exists():  # the deadline ends it
                time.sleep(0.005)
        dist.barrier()

    def _train(
        self,
        ddp: DistributedDataParallel,
        carrier: Carrier,
        batch: Batch,
        batches: Iterator[Batch],
    ) -> None:
        steps, model = self._settings.steps, ddp.module
        optimizer = self._task.optimizer(model, self._task.rate)
        looked_at, kept = checks.sampled(steps), evaluations(steps)
        begun = time.monotonic()
        if self._rank == 0:
            carrier.follow(self._settings.pins)
        for step in range(steps):
            x, wanted = batch
            rate = self._task.learning_rate(step, steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            checker = None
            if step in looked_at:
                checker = checks.Checker(model, carrier.residuals, step)
                checker.before(loss_of(model(x), wanted))
            optimizer.zero_grad()
            loss = loss_of(ddp(x), wanted)
            if self._slower:
                time.sleep(self._slower)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            value = float(loss.detach())
            carrier.observe(value, rate)
            self._ends.append(time.monotonic() - begun)
            self._losses.append(value)
            labels = carrier.labels()
            if not self._plans or labels != self._plans[-1].labels:
                self._plans.append(InForce(step, self._ends[-1], labels))
            if checker is not None:
                self._checks.append(checker.after(carrier.tolerance()))
            if step in kept and kept.index(step) % self._ranks == self._rank:
                self._kept.append((step, copy.deepcopy(model.state_dict())))
            batch = next(batches)

    def _evaluate(self, model: nn.Module) -> tuple[Evaluation, ...]:
        found = []
        for step, state in self._kept:
            model.load_state_dict(state)
            value = self._task.evaluate(model)
            found.append(Evaluation(step, value))
        return tuple(found)


def sweep(settings: Settings) -> RankRecord:
    """Return the step time of every option on the network as it is now; no controller."""
    task, method = TASKS[settings.task], METHODS["bf16"]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    slower = settings.last_seconds if rank == ranks - 1 else 0.0
    batches = task.batches(settings.seed, rank, ranks)
    found = []
    for option in settings.sweep:
        ddp = DistributedDataParallel(
            task.model(settings.seed), bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
        )
        carrier = Carrier(method, ddp, ranks, seed=settings.seed, start=option)
        found.append(_step_seconds(ddp, task.optimizer(ddp.module, 1e-4), batches, slower))
        carrier.close()
        del ddp
    return RankRecord(rank, 0.0, (), (), (), (), (), sweep=tuple(found))


def _step_seconds(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    slower: float,
) -> float:
    seconds = []
    dist.barrier()
    for _ in range(SWEEP_STEPS):
        x, wanted = next(batches)
        begun = time.monotonic()
        optimizer.zero_grad()
        loss = loss_of(ddp(x), wanted)
        time.sleep(slower)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds.append(time.monotonic() - begun)
    return statistics.median(seconds[SWEEP_SETTLED:])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""An operator pins a running job to every compressor and every collective in turn."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradpilot.cli import main
from gradpilot.demo.data import batches, load
from gradpilot.demo.model import BUCKET_CAP_MB, checksum, make_model
from gradpilot.operate import OperatorClient
from gradpilot.protos.messages import Option, RunRef, Setting
from gradpilot.protos.option_text import parse_option
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.collectives.base import SCHEDULES
from gradpilot.worker_agent.compressors.base import COMPRESSORS, option_of
from tests.controller_process import running_controller, until
from tests.ranks import run_ranks

RUN = RunRef("pin-test", "model")
RANKS = 4
STEPS_EACH = 10
LIMIT_SECONDS = 240.0


def in_words(option: Option) -> list[str]:
    """Return an option as the words of the command line."""
    words = [option.compressor, f"ratio={option.ratio}", f"collective={option.collective}"]
    words += [f"skip={option.skip}"] if option.skip else []
    return [*words, *(f"{s.name}={s.value}" for s in option.settings)]


def every_option() -> list[Option]:
    """Return the defaults of every compressor, and every schedule with and without a skip."""
    options = []
    for name in COMPRESSORS:
        compressor = COMPRESSORS.get(name)()
        carrier = next(
            c for c in compressor.collectives if c != "hierarchical" and _able(compressor, c)
        )
        options.append(option_of(compressor, carrier))
    for name in SCHEDULES:
        options += [Option(collective=name), Option("bf16", collective=name, skip=1)]
    return options


def _able(compressor: Any, carrier: str) -> bool:
    try:
        compressor.check(RANKS, carrier)
    except Exception:
        return False
    return True


def _done(folder: Path, option: Option) -> bool:
    """Return whether rank 0 says that it took enough steps under an option."""
    counts = dict(
        line.rsplit(" ", 1) for line in (folder / "counts").read_text().splitlines() if " " in line
    )
    return int(counts.get(repr(option), 0)) >= STEPS_EACH


def _train(rank: int, address: str, folder: Path) -> dict[str, Any]:
    data = load("digits")
    net = make_model(data.features, data.classes, seed=0)
    ddp = DistributedDataParallel(net, bucket_cap_mb=BUCKET_CAP_MB, gradient_as_bucket_view=True)
    handle = attach(ddp, controller=address, run=RUN.run, control_timeout_seconds=10.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    drawn = batches(data, 32, rank, RANKS, 0)
    seen: dict[str, list[Any]] = {}
    deadline = time.monotonic() + LIMIT_SECONDS
    step = 0
    while True:
        samples = next(drawn)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(data.train_x[samples]), data.train_y[samples])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        (option,) = handle.plan.options()
        entry = seen.setdefault(repr(option), [0, True, None])
        entry[0] += 1
        entry[1] &= math.isfinite(float(loss.detach()))
        entry[2] = checksum(ddp.module)
        step += 1
        if rank == 0 and entry[0] == STEPS_EACH:
            with (folder / "counts").open("a") as file:
                file.write(f"{option!r} {entry[0]}\n")
        if step % 5 == 0:
            over = [(folder / "stop").exists() or time.monotonic() > deadline]
            dist.broadcast_object_list(over, 0)
            if over[0]:
                break
    result = {"seen": seen, "frozen": handle.frozen, "counters": handle.counters}
    handle.close()
    return result


@pytest.mark.processes
@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_every_name_can_be_pinned_while_the_job_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "counts").touch()
    options = every_option()
    with (
        running_controller(tmp_path, interval=STEPS_EACH) as controller,
        ThreadPoolExecutor(1) as pool,
    ):
        ranks: Future[Any] = pool.submit(run_ranks, _train, RANKS, controller.address, folder)
        try:
            with OperatorClient(controller.address) as client:
                # DDP lays its buckets out anew in the first steps; a plan for the first layout that
                # arrives after that is turned down, and counted, as it should be.
                until("the layout is final", lambda: client.run(RUN).summary.step >= 10, 30)
                for option in options:
                    words = in_words(option)
                    assert parse_option(" ".join(words)) == option
                    pinned = main(["pin", "--address", controller.address, RUN.run, *words])
                    assert pinned == 0, capsys.readouterr().err
                    until(
                        f"{option.label} for {STEPS_EACH} steps", partial(_done, folder, option), 40
                    )
        finally:
            (folder / "stop").touch()
        results = ranks.result(60)
    for result in results:
        assert result["frozen"] == ""
        assert result["counters"].plans_rejected == 0
        assert result["counters"].nonfinite_steps == 0
        for option in options:
            steps, finite, _ = result["seen"][repr(option)]
            assert steps >= STEPS_EACH, option.label
            assert finite, option.label
            ends = [r["seen"][repr(option)][2] for r in results]
            assert len(set(ends)) == 1, f"{option.label}: ranks differ"


def test_settings_survive_the_command_line() -> None:
    option = Option("topk", 0.1, "allgather", settings=(Setting("a", "1"),))
    assert parse_option(" ".join(in_words(option))) == option

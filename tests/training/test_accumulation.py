"""Accumulated gradients: ``no_sync`` around whole passes, around forward only, around backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from gradpilot.protos.messages import DENSE
from tests.ranks import run_ranks
from tests.training import jobs
from tests.training.jobs import Mode, Trained
from tests.worker_agent import training

pytestmark = pytest.mark.processes

PARTS = 3
"""Micro-batches of a step; the last one synchronises."""


def _loss(net: nn.Module, rank: int, step: int, part: int) -> Any:
    return net(jobs.batch(rank, step, part)).square().sum() / PARTS


def _whole_passes(net: Any, rank: int, step: int) -> None:
    with net.no_sync():
        for part in range(PARTS - 1):
            _loss(net, rank, step, part).backward()
    _loss(net, rank, step, PARTS - 1).backward()


def _forward_only(net: Any, rank: int, step: int) -> None:
    with net.no_sync():
        losses = [_loss(net, rank, step, part) for part in range(PARTS - 1)]
    for loss in losses:
        loss.backward()
    _loss(net, rank, step, PARTS - 1).backward()


def _backward_only(net: Any, rank: int, step: int) -> None:
    """Synchronise every micro-batch, as DDP does when only backward is wrapped."""
    for part in range(PARTS):
        loss = _loss(net, rank, step, part)
        with net.no_sync():
            loss.backward()


def _after_the_first_step(net: Any, rank: int, step: int) -> None:
    """Accumulate from the second step on: a static graph is recorded in a synchronised one."""
    if step == 0:
        _loss(net, rank, step, 0).backward()
    else:
        _whole_passes(net, rank, step)


MODES = (
    Mode("no_sync around whole passes", backward=_whole_passes),
    Mode("no_sync around forward", backward=_forward_only),
    Mode("no_sync around backward", backward=_backward_only),
    Mode(
        "no_sync, gradients as views",
        backward=_whole_passes,
        options={"gradient_as_bucket_view": True},
    ),
    Mode(
        "no_sync, static_graph",
        backward=_after_the_first_step,
        options={"static_graph": True},
    ),
)
SYNCHRONISED = {"no_sync around backward": PARTS}
"""Synchronised backward passes of a step, where it is not one."""

Results = dict[str, list[tuple[Trained, Trained, Trained]]]
each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


@pytest.fixture(scope="module")
def trained() -> Results:
    """Train all jobs in one set of ranks."""
    results = run_ranks(jobs.run_all, 2, MODES)
    return {mode.name: [result[mode.name] for result in results] for mode in MODES}


@each_mode
def test_dense_is_bit_equal_to_plain_ddp(mode: Mode, trained: Results) -> None:
    for plain, dense, _ in trained[mode.name]:
        assert dense.digests == plain.digests
        assert dense.in_sync
        assert dense.steps == jobs.STEPS * SYNCHRONISED.get(mode.name, 1)


@each_mode
def test_lossy_keeps_all_ranks_alike_through_a_switch(mode: Mode, trained: Results) -> None:
    for _, dense, lossy in trained[mode.name]:
        assert lossy.in_sync
        assert not lossy.diverged
        assert lossy.digests != dense.digests
        assert lossy.switches == 1
        assert lossy.steps == dense.steps


def _against_one_process(rank: int) -> tuple[float, int, int]:
    """Return the distance from the mean of what each rank accumulates alone, and the bytes sent."""
    net = Mode("").wrap()
    handle = training.control(net, DENSE)
    worst = 0.0
    for step in range(4):
        alone = copy.deepcopy(net.module)
        alone.zero_grad()
        net.zero_grad()
        for part in range(PARTS):
            _loss(alone, rank, step, part).backward()
        _whole_passes(net, rank, step)
        expected = training.gradients(alone)
        dist.all_reduce(expected)
        got = training.gradients(net)
        worst = max(worst, float((got - expected / 2).norm() / expected.norm()))
    size = sum(p.numel() for p in net.parameters())
    return worst, handle.counters.wire_bytes, 4 * 4 * size


def test_accumulated_gradients_are_the_mean_of_what_each_rank_accumulates() -> None:
    for worst, sent, expected in run_ranks(_against_one_process, 2):
        assert worst < 1e-6
        assert sent == expected, "gradients travel once a step, not once a micro-batch"

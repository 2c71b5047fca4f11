"""One copy of a job, on one rank: with gradpilot or without."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from bench.modes.catalog import UNEVEN, Mode
from bench.modes.models import Size, parameters_of
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.handle import Handle

SEED = 0
RUN = "modes"
RATE = 0.01
MOST_WARM_UPS = 6


class Copy:
    """A job in training. Every rank makes its copies in the same order.

    Args:
        mode: How it trains.
        name: Of the mode; what it wraps is named after it.
        size: Of model and data.
        controller: ``host:port``, ``off`` for none; None for a job without gradpilot.
    """

    def __init__(self, mode: Mode, name: str, size: Size, controller: str | None) -> None:
        torch.manual_seed(SEED)
        self._mode = mode
        self._rank = dist.get_rank()
        self._nets = [mode.wrap(module, size) for module in mode.modules(size)]
        self.handles: list[Handle] = []
        if controller is not None:
            self.handles = [
                attach(net, controller=controller, run=RUN, name=f"{name}-{i}")  # type: ignore[arg-type]
                for i, net in enumerate(self._nets)
            ]
        self._called = [mode.call(net) for net in self._nets]
        # Without momentum: it would tell ranks apart that a join has made alike.
        self._optimizer = torch.optim.SGD([p for n in self._nets for p in n.parameters()], lr=RATE)
        generator = torch.Generator().manual_seed(self._rank)
        self._data = torch.randn(size.batch, size.width, generator=generator)

    def block(self, count: int) -> float:
        """Make steps, all ranks from the same moment on.

        Args:
            count: How many; with uneven inputs of the ranks that make most.

        Returns:
            Wall-clock seconds a step.
        """
        own = count - UNEVEN if self._mode.uneven and self._rank == 1 else count
        dist.barrier()
        begun = time.perf_counter()
        with self._mode.within(self._nets[0]):
            for _ in range(own):
                self._optimizer.zero_grad()
                self._mode.backward(self._called, self._data)
                self._optimizer.step()
        return (time.perf_counter() - begun) / count

    def planned(self) -> bool:
        """Return whether a controller's plan is in force wherever one can come."""
        if not self._mode.planned:
            return True
        return all(h.plan.id > 0 for h in self.handles if h.controller)

    def same_as(self, other: Copy) -> bool:
        """Return whether all parameters are the same bits as those of another copy."""
        pairs = zip(self._nets, other._nets, strict=True)
        return all(
            torch.equal(a, b)
            for ours, theirs in pairs
            for a, b in zip(parameters_of(ours), parameters_of(theirs), strict=True)
        )


def taking_turns(
    copies: Sequence[Copy],
    blocks: int,
    block_steps: int,
    warm_up_steps: int,
    warm: Callable[[], bool] = lambda: True,
) -> list[list[float]]:
    """Let copies take turns, the first in a block being another one every time.

    Args:
        copies: The copies, alike on all ranks.
        blocks: Blocks of each.
        block_steps: Steps of a block.
        warm_up_steps: Steps of each copy before the first block,
        warm: which are made again until this returns true on all ranks, ``MOST_WARM_UPS`` times
            at most.

    Returns:
        Seconds a step, for every copy and block.
    """
    for _ in range(MOST_WARM_UPS):
        for copy in copies:
            copy.block(warm_up_steps)
        if _everywhere(warm()):
            break
    seconds: list[list[float]] = [[] for _ in copies]
    for block in range(blocks):
        for turn in range(len(copies)):
            i = (block + turn) % len(copies)
            seconds[i].append(copies[i].block(block_steps))
    return seconds


def _everywhere(holds: bool) -> bool:
    """Return whether something holds on all ranks; collective."""
    least = torch.tensor(int(holds))
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return bool(least)

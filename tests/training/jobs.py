"""Jobs as people have them: one small model a DDP mode, trained plain or under control.

Every job trains twice, in the same processes: as plain DDP, and under gradpilot. A dense plan must
give the same bits as plain DDP, a lossy one that changes midway must leave all ranks with the same
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradpilot.protos.messages import DENSE, Option
from gradpilot.worker_agent.handle import Handle
from tests.worker_agent import training

STEPS = 14
SWITCH_AT = 10
"""The first decision step of a job that has no plan yet."""
WIDTH = 24
BUCKET_MB = 0.002
TOPK = Option("topk", 0.1, "allgather")
ARTOPK = Option("artopk", 0.3, "native", settings=training.STAR)


def batch(rank: int, step: int, part: int = 0) -> Tensor:
    """Return a rank's own data of a step, float32 of shape (6, WIDTH)."""
    generator = torch.Generator().manual_seed(10_000 * part + 100 * step + rank)
    return torch.randn(6, WIDTH, generator=generator)


def stack(layers: int = 4, width: int = WIDTH) -> nn.Sequential:
    """Return layers that fill a bucket each."""
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.Tanh())))


def one_backward(net: nn.Module, rank: int, step: int) -> None:
    """Run forward and backward on the rank's batch."""
    net(batch(rank, step)).square().sum().backward()


@dataclass(frozen=True)
class Mode:
    """A way in which people train.

    Attributes:
        name: Its name in ``docs/compatibility.md``.
        model: Makes the module; called with the seed set.
        backward: Forward and backward passes of one step.
        options: Keyword arguments of DDP.
        after_wrap: Called with the wrapped model, before the agent is attached.
        before_step: Called with the wrapped model and the step.
        call: Makes what the loop calls, as ``torch.compile`` does.
        buckets: Least number of buckets that this job must have.
    """

    name: str
    model: Callable[[], nn.Module] = stack
    backward: Callable[[Any, int, int], None] = one_backward
    options: dict[str, Any] = field(default_factory=dict)
    after_wrap: Callable[[DistributedDataParallel], None] | None = None
    before_step: Callable[[DistributedDataParallel, int], None] | None = None
    call: Callable[[DistributedDataParallel], nn.Module] | None = None
    buckets: int = 3

    def wrap(self) -> DistributedDataParallel:
        """Return the model in DDP."""
        torch.manual_seed(3)
        net = DistributedDataParallel(self.model(), bucket_cap_mb=BUCKET_MB, **self.options)
        if self.after_wrap is not None:
            self.after_wrap(net)
        return net


@dataclass(frozen=True)
class Trained:
    """What came of a job.

    Attributes:
        digests: Hash of all parameters and buffers after every step.
        diverged: Whether a parameter is not finite at the end.
        steps: Synchronised backward passes as the agent counted them, 0 for plain DDP.
        switches: Plan switches.
        buckets: Buckets in the last layout, 0 for plain DDP.
        in_sync: Whether all ranks had the same parameters after every step.
    """

    digests: tuple[str, ...]
    diverged: bool
    steps: int
    switches: int
    buckets: int
    in_sync: bool


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of tensors of any dtype."""
    flat = [t.detach().reshape(-1).contiguous() for t in tensors]
    return training.digest(torch.cat([t.view(torch.uint8) for t in flat]))


def finite(module: nn.Module) -> bool:
    """Return whether all parameters are finite."""
    return all(bool(p.isfinite().all()) for p in module.parameters())


def offer(handle: Handle, number: int, option: Option, interval: int = 1) -> None:
    """Hand a plan for all buckets of the present layout to this rank, as its controller would."""
    handle._coordinator.offer(training.uniform_plan(handle, number, option, interval))


def train(mode: Mode, rank: int, option: Option | None, switch_to: Option | None = None) -> Trained:
    """Train a job.

    Args:
        mode: The job.
        rank: Own rank.
        option: First option of all buckets; None for plain DDP without an agent.
        switch_to: Option of all buckets from ``SWITCH_AT`` on; one rank hears of it.
    """
    net = mode.wrap()
    handle = training.control(net, option) if option is not None else None
    called = mode.call(net) if mode.call is not None else net
    # Weight decay and momentum move parameters that should have no gradient but got zeros.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
    digests, in_sync = [], True
    for step in range(STEPS):
        if mode.before_step is not None:
            mode.before_step(net, step)
        if handle is not None and switch_to is not None and step == SWITCH_AT - 1 and rank == 1:
            offer(handle, 1, switch_to)
        optimizer.zero_grad()
        mode.backward(called, rank, step)
        if any(p.grad is not None and p.grad.is_sparse for p in net.parameters()):
            _sgd_(net)  # which momentum does not work with
        else:
            optimizer.step()
        digests.append(digest(net.module.state_dict().values()))
        # Not the buffers: BatchNorm's follow each rank's own data until they are broadcast.
        in_sync &= training.same_everywhere(digest(net.parameters()))
    buckets = 0
    if handle is not None:
        assert handle.layout is not None
        assert handle.frozen == ""
        buckets = len(handle.layout.buckets)
    result = Trained(
        digests=tuple(digests),
        diverged=not finite(net),
        steps=handle.step if handle is not None else 0,
        switches=handle.counters.switches if handle is not None else 0,
        buckets=buckets,
        in_sync=in_sync,
    )
    if handle is not None:
        handle.close()
    return result


def _sgd_(net: nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.01)


def run_all(rank: int, modes: Sequence[Mode]) -> dict[str, tuple[Trained, Trained, Trained]]:
    """Train every job as plain DDP, under a dense plan, and under a lossy one that changes."""
    return {
        mode.name: (
            train(mode, rank, None),
            train(mode, rank, DENSE),
            train(mode, rank, TOPK, ARTOPK),
        )
        for mode in modes
    }


# --- models --------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Five branches; a step uses some, and which depends on step and rank."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.rank = 0
        self.step = 0

    def used(self) -> Iterator[int]:
        """Yield the branches of this step: one alone of this rank, some of nobody."""
        yield 0
        if self.step % 3:
            yield 1
        if self.step % 2:
            yield 2 + self.rank % 2
        if self.step >= STEPS - 2:
            yield 4  # until then of no rank

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the branches used."""
        return torch.stack([self.branches[i](x) for i in self.used()]).sum(0)


def through_branches(net: nn.Module, rank: int, step: int) -> None:
    """Run one step of ``Branches``."""
    inner = net.module
    assert isinstance(inner, Branches)
    inner.rank, inner.step = rank, step
    one_backward(net, rank, step)


class Checkpointed(nn.Module):
    """Recomputes its middle in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = stack(1), stack(3), stack(1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the middle's activations thrown away."""
        x = checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant)
        out: Tensor = self.last(x)
        return out


class Tied(nn.Module):
    """Uses one weight for its first and its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), stack(3), nn.Linear(24, 24)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        out: Tensor = self.last(self.middle(self.first(x)))
        return out


class Mixed(nn.Module):
    """Has layers of three dtypes, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.single = stack(2)
        self.exact = stack(2).double()
        self.short = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.register_buffer("counter", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, float64."""
        out: Tensor = self.exact(self.single(x).double()) + self.short(x.bfloat16()).double()
        return out


class Complex(nn.Module):
    """Has a complex weight between real layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = stack(2), stack(2)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)
        self.factor = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output; real and imaginary part both count."""
        turned = self.first(x).to(torch.complex64) @ self.weight * self.factor
        out: Tensor = self.last((turned.real + 2 * turned.imag).float())
        return out


class Sparse(nn.Module):
    """Has an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)
        self.rest = stack(3)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output; the places come from the data."""
        out: Tensor = self.rest(self.table(x.abs().mul(10).long().clamp(max=49)).mean(1))
        return out


def normed() -> nn.Module:
    """Return layers with BatchNorm, whose buffers DDP broadcasts."""
    return nn.Sequential(stack(2), nn.BatchNorm1d(WIDTH), stack(2))

"""Sharded training over gloo: FSDP2, FSDP2 with replicas, FSDP1 and ZeRO-1."""

from __future__ import annotations

import contextlib
import functools
import io
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradpilot.errors import AttachError, ConfigError
from gradpilot.protos.messages import DENSE
from gradpilot.protos.option_text import parse_option
from gradpilot.worker_agent.sharded.warm_up import LOOK_STEPS
from tests.ranks import run_ranks
from tests.worker_agent.sharded.jobs import (
    BF16,
    INT8,
    WIDTH,
    Net,
    batch,
    control,
    equal_everywhere,
    fully_sharded,
    loss_of,
    skip,
    train,
    whole,
)

pytestmark = pytest.mark.processes

STEPS = 4


def followed(net: nn.Module, steps: int = STEPS) -> list[Tensor]:
    """Train a net and return its parameters after every step."""
    seen: list[Tensor] = []
    train(net, steps, lambda _: seen.append(whole(net)))
    return seen


@functools.cache
def without_us() -> list[Tensor]:
    """Return the parameters of the net after every step of FSDP2 alone."""
    return followed(fully_sharded())


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def local(net: nn.Module) -> Tensor:
    """Return this rank's shards."""
    return torch.cat([p.to_local().detach().flatten() for p in net.parameters()])  # type: ignore[attr-defined]


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.to_local() for p in net.parameters() if p.grad is not None]  # type: ignore[attr-defined]


# --- FSDP2 -------------------------------------------------------------------------------------


def dense_is_the_very_same(_: int) -> None:
    for options in ({}, {"reshard_after_forward": False}):
        plain = followed(fully_sharded(**options)) if options else without_us()
        net = fully_sharded(**options)
        handle = control(net)
        assert all(torch.equal(a, b) for a, b in zip(followed(net), plain, strict=True))
        assert (handle.step, handle.plan.default) == (STEPS, DENSE)
        assert handle.counters.wire_bytes == handle.counters.dense_bytes > 0


def others_are_close(_: int) -> None:
    ranks = dist.get_world_size()
    plain = without_us()[-1]
    bounds = [(BF16, 1e-4, 0.5), (INT8, 1e-3, 0.27), (skip(1), 0.05, 1.0)]
    if ranks > 2:
        bounds += [(skip(2, skip_feedback=True), 0.05, 1.0), (skip(1, divisor="drop"), 0.05, 1.0)]
    for option, most, bytes_share in bounds:
        net = fully_sharded()
        handle = control(net, option, warm_up=False)
        after = followed(net)[-1]
        assert bool(after.isfinite().all())
        assert equal_everywhere(after)
        assert 0.0 < apart(after, plain) < most, option.label
        counters = handle.counters
        assert counters.wire_bytes <= bytes_share * counters.dense_bytes
        assert counters.nonfinite_steps == 0


def nothing_is_lost_or_counted_twice(rank: int) -> None:
    """What came out of all steps and what still waits make up what went in."""
    ranks = dist.get_world_size()
    options = [BF16, INT8] + ([skip(1, skip_feedback=True)] if ranks > 2 else [])
    for option in options:
        net = fully_sharded()
        handle = control(net, option, warm_up=False)
        pipeline = handle._sharded
        went_in: dict[str, Tensor] = {}
        came_out: dict[str, Tensor] = {}
        reduce = pipeline.reduce

        def spy(unit: Any, gradient: Tensor, shard: Tensor, *rest: Any, **named: Any) -> None:
            key = unit.slot(ranks, gradient.dtype).key
            went_in[key] = went_in.get(key, 0.0) + gradient.double()  # noqa: B023
            reduce(unit, gradient, shard, *rest, **named)  # noqa: B023
            came_out[key] = came_out.get(key, 0.0) + shard.double()  # noqa: B023

        pipeline.reduce = spy
        train(net, STEPS)
        residuals = pipeline.steps.residuals
        assert residuals.elements > 0
        assert len(went_in) == 3
        for key, total in went_in.items():
            rest = residuals._committed.get(key, 0.0)
            delivered = total - rest
            dist.all_reduce(delivered)
            mine = delivered.view(ranks, -1)[rank] / ranks
            assert torch.allclose(mine, came_out[key], rtol=1e-5, atol=1e-6), option.label


@contextlib.contextmanager
def one_odd_row(net: Any, factor: float) -> Iterator[None]:
    """Multiply a row of one unit's gradient, which belongs to one shard only."""

    def scale(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[:, 0] *= factor
        return gradient

    def watch(_: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(scale)  # type: ignore[no-untyped-call]

    handle = net.first.register_forward_hook(watch)
    yield
    handle.remove()


def overflow_leaves_everything_as_it_was(rank: int) -> None:
    ranks = dist.get_world_size()
    for option in [BF16, INT8] + ([skip(1, skip_feedback=True)] if ranks > 2 else []):
        net = fully_sharded()
        handle = control(net, option, warm_up=False)
        train(net, 2)
        before = handle.state_dict()
        for value in (float("inf"), float("nan")):
            with one_odd_row(net, value if rank == ranks - 1 else 1.0):
                loss_of(net, rank, 2).backward()
            assert any(not bool(g.isfinite().all()) for g in gradients(net)), option.label
            net.zero_grad()
        after = handle.state_dict()
        assert before["residuals"].keys() == after["residuals"].keys()
        for name, kept in before["residuals"].items():
            assert torch.equal(kept, after["residuals"][name])
        assert handle.counters.nonfinite_steps == 2
        train(net, 1, first=2)
        assert bool(local(net).isfinite().all())


def a_failed_backward_is_forgotten(rank: int) -> None:
    def fail(_: Tensor) -> None:
        raise ArithmeticError

    net = fully_sharded()
    handle = control(net, BF16)
    train(net, 2)
    before = handle.state_dict()["residuals"]
    hidden = net.first(batch(rank, 2))
    broken = hidden.detach().requires_grad_()
    broken.register_hook(fail)
    net_input = broken[:, :1].expand(-1, WIDTH)
    with pytest.raises(ArithmeticError):
        net(net_input).sum().backward()
    net.reset_iter_state()  # type: ignore[operator]
    net.zero_grad()
    train(net, 1, first=2)
    after = handle.state_dict()["residuals"]
    assert handle.step == 3
    assert before.keys() == after.keys()

    same = fully_sharded()
    other = control(same, BF16)
    train(same, 3)
    # The pass that failed left no trace.
    assert all(torch.equal(after[n], r) for n, r in other.state_dict()["residuals"].items())


def accumulation_saves_bytes(rank: int) -> None:
    for option in (DENSE, BF16):
        nets = [fully_sharded(), fully_sharded()]
        handles = [control(nets[0], option), control(nets[1], option)]
        for net, last_only in zip(nets, (False, True), strict=True):
            for part in range(3):
                net.set_requires_gradient_sync(not last_only or part == 2)  # type: ignore[operator]
                loss_of(net, rank, part).backward()
        assert [h.step for h in handles] == [3, 1]
        assert handles[0].counters.wire_bytes == 3 * handles[1].counters.wire_bytes
        for one, other in zip(*map(gradients, nets), strict=True):
            assert torch.allclose(one, other, rtol=0.02, atol=1e-3)


class Odd(nn.Module):
    """Uses one unit twice, another one not always, and checkpoints a third in either way."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.checkpointed = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.reentrant = reentrant
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        self.calls += 1
        x = self.twice(self.twice(x).tanh()).tanh()
        x = checkpoint(self.checkpointed, x, use_reentrant=self.reentrant)
        for layer in self.sometimes[: 1 + self.calls % 2]:
            x = layer(x.tanh())
        return x


def odd_models_stay_in_step(_: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def make(reentrant: bool) -> nn.Module:
        torch.manual_seed(0)
        net = Odd(reentrant)
        for part in (net.twice, net.checkpointed, net):
            fully_shard(part, mesh=mesh)
        return net

    for reentrant in (False, True):
        plain = followed(make(reentrant), 4)
        for option in (DENSE, BF16):
            net = make(reentrant)
            handle = control(net, option)
            got = followed(net, 4)
            assert handle.step == 4
            if option == DENSE:
                assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
            else:
                assert apart(got[-1], plain[-1]) < 1e-3
                assert equal_everywhere(got[-1])


def low_precision_and_own_factors(rank: int) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    for dtype in (torch.bfloat16, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        plain = followed(fully_sharded(mp_policy=policy))
        for option in (DENSE, BF16, INT8):
            net = fully_sharded(mp_policy=policy)
            control(net, option)
            got = followed(net)
            if option == DENSE:
                assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
            assert apart(got[-1], plain[-1]) < 0.02
    nets = [fully_sharded(), fully_sharded()]
    control(nets[1], BF16)
    for net in nets:
        for part in (net.first, net.second, net):
            part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        loss_of(net, rank, 0).backward()
    for one, other in zip(*map(gradients, nets), strict=True):
        assert torch.allclose(one, other, rtol=0.01, atol=1e-4)


def loss_scale_and_checkpoint(_: int) -> None:
    class Scaler:
        scale = 1.0

        def get_scale(self) -> float:
            return self.scale

    from gradpilot.worker_agent.agent import attach

    def resumed(state: dict[str, Any] | None, net: Any, first: int, steps: int) -> Any:
        handle = control(net, INT8)
        if state is not None:
            handle.load_state_dict(state)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(first, first + steps):
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return handle

    net = fully_sharded()
    saved = resumed(None, net, 0, 3).state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    parameters = {n: p.detach().clone() for n, p in net.state_dict().items()}
    again = fully_sharded(seed=1)
    again.load_state_dict(parameters)
    resumed(torch.load(file, weights_only=True), again, 3, 2)
    straight = fully_sharded()
    resumed(None, straight, 0, 5)
    assert torch.equal(whole(again), whole(straight))
    other = control(fully_sharded(), INT8)
    other.load_state_dict({**saved, "world_size": 99})
    assert other.counters.residual_resets == len(saved["residuals"])
    with pytest.raises(ConfigError, match="state of a sharded model"):
        other.load_state_dict({"version": 3})
    everybodys = [{**saved, "rank": r, "step": 7 + r} for r in range(dist.get_world_size())]
    other.load_state_dict(everybodys)
    assert other.step == 7 + dist.get_rank()

    scaler = Scaler()
    net = fully_sharded()
    handle = attach(net, controller="off", start=INT8, grad_scaler=scaler)  # type: ignore[arg-type]
    resumed_loss = loss_of(net, dist.get_rank(), 0)
    resumed_loss.backward()
    before = handle.state_dict()["residuals"]
    scaler.scale = 4.0
    net.zero_grad()
    (0.0 * loss_of(net, dist.get_rank(), 1)).backward()
    total = sum(float((4.0 * r).abs().max()) for r in before.values())
    assert total > 0.0
    sent = torch.cat([g.flatten() for g in gradients(net)])
    assert float(sent.abs().max()) > 0.0  # nothing but what had been kept, four times


def warm_up_and_older_weights(_: int) -> None:
    net = fully_sharded()
    handle = control(net, skip(1))
    plain = without_us()[:3]
    assert all(torch.equal(a, b) for a, b in zip(followed(net, 3), plain, strict=True))
    assert not handle.warm  # cold: dense, bit for bit
    fixed = fully_sharded()
    steady = control(fixed, skip(1))
    for _step in range(4 * LOOK_STEPS):
        loss_of(fixed, dist.get_rank(), 0).backward()
        fixed.zero_grad()
    assert steady.warm

    net = fully_sharded()
    handle = control(net, skip(1), warm_up=False, weight_refresh_steps=2)
    got = followed(net, 5)  # the sixth step would begin with older weights
    assert bool(got[-1].isfinite().all())
    assert equal_everywhere(got[-1])
    assert handle.weights.partial_gathers > 0
    assert handle.weights.bytes_received < handle.weights.bytes_in_full
    # Whoever is not training sees the owners' values, all of them.
    partial = handle.weights.partial_gathers
    net.first.unshard()  # type: ignore[operator]
    assert equal_everywhere(net.first.weight.detach())
    net.first.reshard()  # type: ignore[operator]
    net.eval()
    with torch.no_grad():
        scores = net(batch(0, 0))
    assert equal_everywhere(scores)
    net.train()
    with torch.no_grad():
        assert torch.equal(net(batch(0, 0)), scores)
    assert handle.weights.partial_gathers == partial


def what_cannot_be_done_is_said(_: int) -> None:
    net = fully_sharded()
    with pytest.raises(ConfigError, match="a sharded model can be given"):
        control(net, parse_option("topk ratio=0.1 collective=allgather"))
    with pytest.raises(ConfigError, match="weight_refresh_steps needs an option that skips"):
        control(net, BF16, weight_refresh_steps=2)
    handle = control(net, BF16)
    with pytest.raises(AttachError, match="PlanReduceScatter is set on this model already"):
        control(net, BF16)
    assert "no controller plans sharded models yet" in handle.frozen
    train(net, 2)
    assert handle.state_dict()["residuals"]
    handle.detach()
    train(net, 1, first=2)
    assert not handle.state_dict()["residuals"]  # sent with the first step after
    handle.close()


# --- replicas ----------------------------------------------------------------------------------


def mesh_of_two_dimensions() -> Any:
    """Return a mesh of two replicas of two shards."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@functools.cache
def two_dimensions() -> list[Tensor]:
    """Return what FSDP2 alone makes of shards and replicas."""
    return followed(fully_sharded(mesh_of_two_dimensions()))


def two_dimensions_are_observed(_: int) -> None:
    net = fully_sharded(mesh_of_two_dimensions())
    handle = control(net, BF16)
    assert "pass Sharding(replicas=...)" in handle.observes
    assert all(torch.equal(a, b) for a, b in zip(followed(net), two_dimensions(), strict=True))
    assert handle.counters.wire_bytes == handle.counters.dense_bytes > 0


def compressed_across_replicas(rank: int) -> None:
    mesh, plain = mesh_of_two_dimensions(), two_dimensions()
    shards, replicas = mesh["shard"], mesh["replicate"].get_group()
    for text, most in (
        ("none", 1e-7),
        ("bf16", 1e-3),
        ("int8 collective=alltoall exchange=all_to_all", 1e-3),
        ("topk ratio=0.2 collective=allgather", 0.05),
        ("powersgd", 0.05),
    ):
        net = fully_sharded(shards)
        handle = control(net, parse_option(text), replicas=replicas)
        got = followed(net)
        assert equal_everywhere(got[-1]), text
        assert apart(got[-1], plain[-1]) <= most, text
        before = handle.state_dict()["residuals"]
        if text == "none":
            continue
        with one_odd_row(net, float("nan") if rank == 3 else 1.0):
            loss_of(net, rank, STEPS).backward()
        assert any(not bool(g.isfinite().all()) for g in gradients(net))
        after = handle.state_dict()["residuals"]
        assert before, text
        assert all(torch.equal(kept, after[name]) for name, kept in before.items())
        assert handle.counters.nonfinite_steps == 1

    net = fully_sharded(shards)
    handle = control(net, skip(1), replicas=replicas)
    for _ in range(4 * LOOK_STEPS):
        loss_of(net, rank, 0).backward()
        net.zero_grad()
    assert handle.warm
    assert equal_everywhere(followed(net, 2)[-1])


# --- FSDP1 and ZeRO-1 --------------------------------------------------------------------------


def older_wrappers(_: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    warnings.simplefilter("ignore")  # FSDP1 warns that it is old

    def wrap(strategy: ShardingStrategy) -> FullyShardedDataParallel:
        torch.manual_seed(0)
        options: Any = {
            "sharding_strategy": strategy,
            "use_orig_params": True,
            "device_id": torch.device("cpu"),
        }
        net = Net()
        net.first = FullyShardedDataParallel(net.first, **options)  # type: ignore[assignment]
        net.second = FullyShardedDataParallel(net.second, **options)  # type: ignore[assignment]
        return FullyShardedDataParallel(net, **options)

    def trained(net: FullyShardedDataParallel) -> Tensor:
        train(net, 4)
        with FullyShardedDataParallel.summon_full_params(net):
            return whole(net).clone()

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        plain = trained(wrap(strategy))
        for option, most in ((DENSE, 0.0), (BF16, 1e-3), (INT8, 1e-3), (skip(1), 0.05)):
            net = wrap(strategy)
            handle = control(net, option, warm_up=False)
            after = trained(net)
            assert apart(after, plain) <= most
            assert equal_everywhere(after)
            assert (handle.step, handle.counters.nonfinite_steps) == (4, 0)
    net = wrap(ShardingStrategy.FULL_SHARD)
    train(net, 1)
    with pytest.raises(AttachError, match="attach the outermost"):
        control(net.first, BF16)
    control(net, BF16)
    with pytest.raises(AttachError, match="one is registered"):
        control(net, BF16)


def zero_one(_: int) -> None:
    """ZeRO-1 shards the optimizer and leaves gradients to DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from gradpilot.worker_agent.agent import attach

    def trained(start: Any) -> Tensor:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Net(), bucket_cap_mb=0.005)
        handle = attach(ddp, controller="off", start=start) if start is not None else None
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
        for step in range(4):
            loss_of(ddp, dist.get_rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle is not None:
            assert handle.step == 4
            handle.close()
        return whole(ddp)

    plain = trained(None)
    assert torch.equal(trained(DENSE), plain)
    compressed = trained(parse_option("topk ratio=0.3 collective=allgather"))
    assert equal_everywhere(compressed)
    assert 0.0 < apart(compressed, plain) < 0.2


# --- one set of ranks a group ------------------------------------------------------------------

ON_ANY_NUMBER = (
    dense_is_the_very_same,
    others_are_close,
    nothing_is_lost_or_counted_twice,
    overflow_leaves_everything_as_it_was,
)
CHECKS = {
    "FSDP2 on 2 ranks": (
        *ON_ANY_NUMBER,
        a_failed_backward_is_forgotten,
        accumulation_saves_bytes,
        odd_models_stay_in_step,
        low_precision_and_own_factors,
        loss_scale_and_checkpoint,
        warm_up_and_older_weights,
        what_cannot_be_done_is_said,
    ),
    "FSDP2 on 4 ranks": (*ON_ANY_NUMBER, two_dimensions_are_observed, compressed_across_replicas),
    "FSDP1 and ZeRO-1": (older_wrappers, zero_one),
}


def run_all(rank: int, group: str) -> dict[str, str]:
    """Run the checks of a group; return what went wrong, "" for nothing, by name."""
    found = {}
    for check in CHECKS[group]:
        try:
            check(rank)
        except BaseException:
            found[check.__name__] = traceback.format_exc()
            break  # the ranks are no longer in step
        found[check.__name__] = ""
    return found


@functools.cache
def outcomes(group: str) -> list[dict[str, str]]:
    return run_ranks(run_all, 4 if "4" in group else 2, group, expect_failure=True)


@pytest.mark.parametrize(
    ("group", "check"),
    [(group, check.__name__) for group, checks in CHECKS.items() for check in checks],
    ids=lambda value: value,
)
def test_sharded(group: str, check: str) -> None:
    for found in outcomes(group):
        assert found.get(check, "not reached: a check before it failed") == ""

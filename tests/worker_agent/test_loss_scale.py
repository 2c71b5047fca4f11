from __future__ import annotations

import io
import math

import pytest
import torch

from gradpilot.protos.messages import DENSE, Option, Setting
from gradpilot.worker_agent.agent import attach
from gradpilot.worker_agent.loss_scale import LossScale
from gradpilot.worker_agent.memory import MemoryStore, owner_of
from tests.ranks import run_ranks
from tests.worker_agent import training

DGC = Option("dgc", 0.05, "allgather", settings=(Setting("momentum", "0.9"),))


class Scale:
    def __init__(self, value: float) -> None:
        self.value = value

    def get_scale(self) -> float:
        return self.value


def test_the_factor_is_by_how_much_the_scale_grew() -> None:
    scale = Scale(1024.0)
    follows = LossScale(scale)
    assert follows.look() == 1024.0  # from gradients that were never scaled
    assert follows.look() == 1.0
    scale.value = 256.0
    assert follows.look() == 0.25
    assert follows.value == 256.0


@pytest.mark.parametrize("odd", [0.0, -2.0, math.inf, math.nan])
def test_a_scale_that_is_none_counts_as_the_one_before(odd: float) -> None:
    scale = Scale(8.0)
    follows = LossScale(scale)
    follows.look()
    scale.value = odd
    assert follows.look() == 1.0
    scale.value = 16.0
    assert follows.look() == 2.0


def test_without_a_scaler_nothing_is_scaled() -> None:
    assert (LossScale().look(), LossScale().value) == (1.0, 1.0)


def test_what_is_linear_in_the_gradient_follows_and_the_rest_stays() -> None:
    store, owner = MemoryStore(), owner_of(DGC)
    store.stage("a", owner, {"velocity": torch.ones(3), "residual": torch.ones(3)})
    store.stage("b", owner_of(Option("sidco", 0.1)), {"stages": torch.tensor(2)})
    store.commit()
    store.rescale(4.0)
    held = store.recall("a", owner)
    assert held["velocity"].tolist() == held["residual"].tolist() == [4.0] * 3
    assert int(store.recall("b", owner_of(Option("sidco", 0.1)))["stages"]) == 2


def _train(
    rank: int, option: Option, growth: int, told: bool, save_at: int = -1
) -> tuple[str, float, bytes]:
    """Train with a scale that doubles every ``growth`` steps; return weights, scale, checkpoint."""
    # In this mode DDP never lays its buckets out anew, so a resumed job has the same ones.
    net, file = training.wrap(find_unused_parameters=True), b""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=growth)
    handle = attach(
        net,
        controller="off",
        start=option,
        control_timeout_seconds=5.0,
        grad_scaler=scaler if told else None,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(8):
        if step == save_at:
            state = {"model": net.module.state_dict(), "scaler": scaler.state_dict()}
            buffer = io.BytesIO()
            torch.save({**state, "agent": handle.state_dict()}, buffer)
            file = buffer.getvalue()
        _step(net, rank, step, scaler, optimizer)
    return _weights(net), scaler.get_scale(), file


def _step(
    net: torch.nn.Module,
    rank: int,
    step: int,
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
) -> None:
    optimizer.zero_grad()
    loss = net(training.batch(rank, step)).square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def _weights(net: torch.nn.Module) -> str:
    return training.digest(torch.cat([p.detach().flatten() for p in net.parameters()]))


def _resume(rank: int, option: Option, files: list[bytes]) -> str:
    state = torch.load(io.BytesIO(files[rank]), weights_only=True)
    net = training.wrap(find_unused_parameters=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=3)
    handle = attach(
        net, controller="off", start=DENSE, control_timeout_seconds=5.0, grad_scaler=scaler
    )
    net.module.load_state_dict(state["model"])
    # Half of the scale that the checkpoint was made under.
    scaler.load_state_dict({**state["scaler"], "scale": state["scaler"]["scale"] / 2})
    handle.load_state_dict(state["agent"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(5, 8):
        _step(net, rank, step, scaler, optimizer)
    return _weights(net)


@pytest.mark.processes
@pytest.mark.parametrize("option", [Option("topk", 0.05, "allgather"), DGC], ids=lambda o: o.label)
def test_training_does_not_notice_a_scale_that_changes(option: Option) -> None:
    # Powers of two scale everything exactly, so that weights must agree bit for bit.
    steady = run_ranks(_train, 2, option, 1000, True)
    growing = run_ranks(_train, 2, option, 3, True, 5)
    assert (steady[0][1], growing[0][1]) == (1024.0, 4096.0)
    assert [weights for weights, _, _ in growing] == [weights for weights, _, _ in steady]
    untold = run_ranks(_train, 2, option, 3, False)
    assert untold[0][0] != steady[0][0]
    files = [file for _, _, file in growing]
    assert run_ranks(_resume, 2, option, files) == [weights for weights, _, _ in steady]

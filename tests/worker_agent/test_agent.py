"""``attach`` and the handle: refusals, absent controllers, checkpoints, detaching."""

from __future__ import annotations

import io
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradpilot.errors import AttachError, ConfigError
from gradpilot.protos.messages import BF16, DENSE, Option
from gradpilot.worker_agent.agent import attach
from tests.ranks import free_port, run_ranks
from tests.worker_agent import training

pytestmark = pytest.mark.processes

TOPK = Option("topk", 0.05, "allgather")


# --- refusals ------------------------------------------------------------------------------------


def test_a_model_that_is_not_ddp_is_refused_in_one_sentence() -> None:
    with pytest.raises(AttachError, match=r"expects a model wrapped in .*got Linear"):
        attach(nn.Linear(2, 2))  # type: ignore[arg-type]


def _refusals(rank: int) -> list[str]:
    texts = []
    taken = training.wrap()
    taken.register_comm_hook(None, allreduce_hook)
    twice = training.wrap()
    training.control(twice)
    for net, start in ((taken, DENSE), (twice, DENSE), (training.wrap(), Option("tpok"))):
        try:
            training.control(net, start)
        except (AttachError, ConfigError) as error:
            texts.append(str(error))
        # Training goes on whatever was refused.
        for step in range(3):
            training.backward(net, rank, step)
        assert training.same_everywhere(training.digest(training.gradients(net)))
    return texts


def test_a_taken_hook_slot_or_a_bad_option_is_refused_and_training_goes_on() -> None:
    for first, second, third in run_ranks(_refusals, 2):
        assert "allreduce_hook is registered already" in first
        assert "registered already" in second
        assert "unknown compressor 'tpok'" in third


# --- controllers that are not there --------------------------------------------------------------


def _alone(rank: int, address: str) -> tuple[int, float, int]:
    net = training.wrap()
    handle = attach(
        net, controller=address, start=TOPK, report_seconds=0.1, control_timeout_seconds=2.0
    )
    slowest = 0.0
    for step in range(60):
        begun = time.monotonic()
        training.backward(net, rank, step)
        if step > 5:  # the first steps allocate
            slowest = max(slowest, time.monotonic() - begun)
        time.sleep(0.02)
    begun = time.monotonic()
    handle.close()
    assert time.monotonic() - begun < 2.5
    return handle.step, slowest, handle.plan.id


def test_training_goes_on_without_the_controller_that_was_configured() -> None:
    for steps, _, plan in run_ranks(_alone, 2, f"127.0.0.1:{free_port()}"):
        assert (steps, plan) == (60, 0)


def test_a_controller_that_accepts_and_never_answers_holds_nothing_up() -> None:
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            try:
                while True:
                    accepted.append(server.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        port = server.getsockname()[1]
        for steps, slowest, plan in run_ranks(_alone, 2, f"127.0.0.1:{port}"):
            assert (steps, plan) == (60, 0)
            assert slowest < 1.0, "no step waits for the controller's deadline of 2 s"
    assert accepted, "the agents were expected to try"
    for connection in accepted:
        connection.close()


# --- checkpoints ---------------------------------------------------------------------------------


def _steps(net: DistributedDataParallel, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in steps:
        optimizer.zero_grad()
        training.backward(net, rank, step)
        optimizer.step()


def _weights(net: nn.Module) -> str:
    return training.digest(torch.cat([p.detach().flatten() for p in net.parameters()]))


def _start(option: Option) -> tuple[DistributedDataParallel, Any]:
    # In this mode DDP never lays its buckets out anew, so a resumed job has the same ones.
    net = training.wrap(find_unused_parameters=True)
    return net, training.control(net, option)


def _interrupted(rank: int, option: Option) -> tuple[bytes, str]:
    net, handle = _start(option)
    _steps(net, rank, range(5))
    file = io.BytesIO()
    torch.save({"model": net.module.state_dict(), "agent": handle.state_dict()}, file)
    _steps(net, rank, range(5, 10))
    return file.getvalue(), _weights(net)


def _resumed(rank: int, files: list[bytes]) -> tuple[str, int, str]:
    state = torch.load(io.BytesIO(files[rank]), weights_only=True)
    net, handle = _start(DENSE)
    net.module.load_state_dict(state["model"])
    handle.load_state_dict(state["agent"])
    assert handle.step == 5
    _steps(net, rank, range(5, 10))
    return _weights(net), handle.step, handle.plan.options()[0].label


@pytest.mark.parametrize(
    "option", [TOPK, BF16, Option("artopk", 0.2, "native", settings=training.STAR)]
)
def test_a_resumed_job_is_bit_equal_to_one_that_was_not_interrupted(option: Option) -> None:
    whole = run_ranks(_interrupted, 2, option)
    for (weights, step, label), (_, expected) in zip(
        run_ranks(_resumed, 2, [file for file, _ in whole]), whole, strict=True
    ):
        assert weights == expected
        assert step == 10
        assert label == option.label


def _resized(rank: int, file: bytes) -> tuple[int, int, str]:
    state = torch.load(io.BytesIO(file), weights_only=True)
    net, handle = _start(DENSE)
    handle.load_state_dict(state["agent"])
    _steps(net, rank, range(5, 8))
    return handle.step, handle.counters.residual_resets, handle.plan.options()[0].label


def test_another_world_size_keeps_the_step_and_drops_residuals_by_count() -> None:
    (file, _), *_ = run_ranks(_interrupted, 2, TOPK)
    for step, resets, label in run_ranks(_resized, 3, file):
        assert (step, label) == (8, DENSE.label)
        assert resets == 14  # parameters of the model


def test_a_state_of_another_version_is_refused() -> None:
    assert run_ranks(_foreign_state, 1) == ["expected agent state of version 3, got 7"]


def _foreign_state(rank: int) -> str:
    _, handle = _start(DENSE)
    try:
        handle.load_state_dict({"version": 7})
    except ConfigError as error:
        return str(error).split(";")[0]
    return "accepted"


# --- detaching -----------------------------------------------------------------------------------


def _detaching(rank: int) -> tuple[float, bool, bool]:
    net = training.wrap()
    handle = training.control(net, TOPK)
    size = sum(p.numel() for p in net.parameters())
    total, arrived = torch.zeros(size).double(), torch.zeros(size).double()
    for step in range(8):
        total += training.local_gradients(net, rank, step).double()
        for p in net.parameters():
            p.grad = None
        if step == 6:
            handle.detach()
        training.backward(net, rank, step)
        arrived += training.gradients(net).double()
    dist.all_reduce(total)
    missing = float((2 * arrived - total).norm() / total.norm())

    # The last step had nothing left to send: it is plain DDP, bit for bit.
    plain = training.wrap()
    for step in range(2):
        for p in plain.parameters():
            p.grad = None
        training.backward(plain, rank, step + 6)
    same = torch.equal(training.gradients(plain), training.gradients(net))
    again = training.wrap()
    training.control(again, TOPK)
    for step in range(3):
        training.backward(again, rank, step)
    return missing, same, training.same_everywhere(training.digest(training.gradients(again)))


def test_detaching_sends_the_rest_and_leaves_plain_ddp() -> None:
    for missing, same, again in run_ranks(_detaching, 2):
        assert missing < 1e-5
        assert same
        assert again, "another model can be attached afterwards"


def _two_models(rank: int) -> bool:
    nets = [training.wrap(), training.wrap()]
    handles = [
        attach(net, controller="off", name=f"model{i}", start=start)
        for i, (net, start) in enumerate(zip(nets, (TOPK, BF16), strict=True))
    ]
    equal = True
    for step in range(8):
        for net in nets:
            for p in net.parameters():
                p.grad = None
            training.backward(net, rank, step)
            equal &= training.same_everywhere(training.digest(training.gradients(net)))
    return equal and [h.model for h in handles] == ["model0", "model1"]


def test_two_models_in_one_process_do_not_meet() -> None:
    assert run_ranks(_two_models, 3) == [True] * 3


def _subgroup(rank: int) -> bool:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    net = DistributedDataParallel(
        training.model(), bucket_cap_mb=training.BUCKET_MB, process_group=mine
    )
    training.control(net, DENSE if rank < 2 else TOPK)
    equal = True
    for step in range(6):
        for p in net.parameters():
            p.grad = None
        training.backward(net, rank, step)
        grads = training.gradients(net)
        mean = training.local_gradients(net, rank, step)
        dist.all_reduce(mean, group=mine)
        if rank < 2:
            equal &= bool(torch.allclose(grads, mean / 2, atol=1e-6))
        other = [torch.empty_like(grads) for _ in range(2)]
        dist.all_gather(other, grads, group=mine)
        equal &= torch.equal(other[0], other[1])
    return equal


def test_models_on_subgroups_use_their_groups_size_and_plans() -> None:
    assert run_ranks(_subgroup, 4) == [True] * 4

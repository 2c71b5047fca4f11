"""Checkpoints as jobs write them: ``weights_only``, ``torch.distributed.checkpoint``, pickles."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import gradpilot
from gradpilot.errors import ConfigError
from gradpilot.protos.messages import DENSE
from gradpilot.worker_agent.handle import Handle
from gradpilot.worker_agent.hook_state import HookState
from tests.ranks import run_ranks
from tests.training import jobs
from tests.training.jobs import TOPK, Mode
from tests.worker_agent import training

pytestmark = pytest.mark.processes

# In this mode DDP never lays its buckets out anew, so a resumed job has the same ones.
MODE = Mode("", jobs.stack, options={"find_unused_parameters": True})
BEFORE, AFTER = range(6), range(6, 12)


def _train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> str:
    for step in steps:
        optimizer.zero_grad()
        jobs.one_backward(net, rank, step)
        optimizer.step()
    return jobs.digest(net.parameters())


def _sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def _residuals(handle: Handle) -> str:
    kept = handle.state_dict()["residuals"]
    return jobs.digest(kept[name] for name in sorted(kept))


def _distributed(rank: int, folder: str) -> dict[str, Any]:
    net = MODE.wrap()
    optimizer, handle = _sgd(net), training.control(net, TOPK)
    _train(net, optimizer, rank, BEFORE)
    kept = _residuals(handle)
    residuals = {name: r.clone() for name, r in handle.state_dict()["residuals"].items()}
    written = {"model": net.module.state_dict(), "agent": handle.rank_state()}
    save(written, checkpoint_id=folder)
    momenta = copy.deepcopy(optimizer.state_dict())  # which goes on with the optimizer
    whole = _train(net, optimizer, rank, AFTER)

    resumed = MODE.wrap()
    with torch.no_grad():
        for p in resumed.parameters():
            p.zero_()
    again, fresh = _sgd(resumed), training.control(resumed, DENSE)
    load({"model": resumed.module.state_dict(), "agent": fresh.rank_state()}, checkpoint_id=folder)
    again.load_state_dict(momenta)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, kept)
    return {
        "kept": kept,
        "residuals": residuals,
        "differ": len(set(everybody)) == len(everybody),
        "loaded": _residuals(fresh),
        "step": fresh.step,
        "option": fresh.plan.options()[0].label,
        "equal": _train(resumed, again, rank, AFTER) == whole,
    }


def _on_more_ranks(rank: int, folder: str) -> dict[str, torch.Tensor]:
    handle = training.control(MODE.wrap(), DENSE)
    load({"agent": handle.rank_state(saved_by=2)}, checkpoint_id=folder)
    assert handle.step == len(BEFORE)
    assert handle.counters.residual_resets == 0
    return {name: r.clone() for name, r in handle.state_dict()["residuals"].items()}


def test_distributed_checkpoint_keeps_every_ranks_own_residual(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    results = run_ranks(_distributed, 2, folder)
    for result in results:
        assert result["differ"], "each rank was expected to have a residual of its own"
        assert result["loaded"] == result["kept"]
        assert (result["step"], result["option"]) == (len(BEFORE), TOPK.label)
        assert result["equal"]

    # Three ranks go on with all that the two had not sent.
    more = run_ranks(_on_more_ranks, 3, folder)
    for name in results[0]["residuals"]:
        before = results[0]["residuals"][name] + results[1]["residuals"][name]
        after = sum(residuals[name] for residuals in more if name in residuals)
        assert torch.allclose(before, after, atol=1e-6), name


def _pickled(rank: int) -> dict[str, Any]:
    """Save a model's hook with its state, load both, register them anew, and train on."""
    net = MODE.wrap()
    state, optimizer = HookState(controller="off", start=TOPK), _sgd(net)
    net.register_comm_hook(state, gradpilot.hook)
    _train(net, optimizer, rank, BEFORE)
    file = io.BytesIO()
    torch.save({"model": net.module.state_dict(), "hook": gradpilot.hook, "state": state}, file)
    momenta = copy.deepcopy(optimizer.state_dict())  # which goes on with the optimizer
    whole = _train(net, optimizer, rank, AFTER)

    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    resumed = MODE.wrap()
    resumed.module.load_state_dict(loaded["model"])
    resumed.register_comm_hook(loaded["state"], loaded["hook"])
    again = _sgd(resumed)
    again.load_state_dict(momenta)
    trained_on = _train(resumed, again, rank, AFTER)

    refused = ""
    try:
        torch.save(HookState(grad_scaler=object()), io.BytesIO())
    except ConfigError as error:
        refused = str(error)
    handle = loaded["state"].handle
    return {
        "same_hook": loaded["hook"] is gradpilot.hook,
        "equal": trained_on == whole,
        "steps": handle.step,
        "option": handle.plan.options()[0].label,
        "refused": refused,
    }


def test_a_pickled_hook_state_goes_on_where_it_was() -> None:
    for result in run_ranks(_pickled, 2):
        assert result["same_hook"]
        assert result["equal"]
        assert result["steps"] == AFTER.stop
        assert result["option"] == TOPK.label
        assert "save state.handle.state_dict() instead" in result["refused"]

"""Run by ``test_frameworks`` on every rank: the examples with frameworks, one after another.

    torchrun ... tests/examples/drive.py FOLDER NAME ...

Each trains, writes a checkpoint, and goes on from it for another epoch. What it comes to is written
to FOLDER, a file for each rank. A plain DDP model comes last, for ``gradpilot.auto``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradpilot.worker_agent.handle import Handle, _open
from tests.worker_agent.training import digest, same_everywhere

EPOCHS = 3
EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def lightning(folder: Path) -> tuple[tuple[float, nn.Module, Handle], tuple[Any, ...]]:
    train = example("train_lightning").train
    checkpoint = str(folder / "lightning.ckpt")
    accuracy, model, callback = train(EPOCHS, checkpoint)
    first = accuracy, model, callback.handle
    return first, (*resumed(train, EPOCHS + 1, resume=checkpoint),)


def accelerate(folder: Path) -> tuple[tuple[float, nn.Module, Handle], tuple[Any, ...]]:
    train = example("train_accelerate").train
    checkpoint = str(folder / "accelerate")
    return train(EPOCHS, checkpoint), (*resumed(train, 1, resume=checkpoint),)


def hf_trainer(folder: Path) -> tuple[tuple[float, nn.Module, Handle], tuple[Any, ...]]:
    train = example("train_hf_trainer").train
    where = str(folder / "trainer")
    accuracy, model, callback = train(EPOCHS, where)
    checkpoint = f"{where}/checkpoint-{callback.handle.step}"
    first = accuracy, model, callback.handle
    return first, (*resumed(train, EPOCHS + 1, where, resume=checkpoint),)


def resumed(train: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, ...]:
    """Train without a controller, so that the plan can only be the checkpoint's."""
    os.environ["GRADPILOT_CONTROLLER"], before = "off", os.environ["GRADPILOT_CONTROLLER"]
    try:
        accuracy, model, handle = train(*arguments, **named)
        return accuracy, model, getattr(handle, "handle", handle)
    finally:
        os.environ["GRADPILOT_CONTROLLER"] = before


def seen(accuracy: float, model: nn.Module, handle: Handle) -> dict[str, Any]:
    """Return what a rank can say of a training."""
    counters = handle.counters
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "accuracy": accuracy,
        "steps": handle.step,
        "switches": counters.switches,
        "reports dropped": counters.reports_dropped,
        "resets": counters.residual_resets,
        "sent": counters.wire_bytes / counters.dense_bytes,
        "equal": same_everywhere(digest(weights)),
        "frozen": handle.frozen,
        "controller": handle.controller,
    }


def wait_for_the_plan(module: nn.Module, _: Any) -> None:
    """Slow a step down as long as the controller's plan is not there: digits are soon learned."""
    waiting = any(handle.controller and handle.plan.key == (0, 0) for handle in _open)
    if waiting and isinstance(module, DistributedDataParallel):
        time.sleep(0.02)


def plain_model() -> str:
    """Return what has become of a model that nobody attached."""
    net = DistributedDataParallel(nn.Linear(8, 8))
    before = len(net._comm_hooks)
    net(torch.ones(2, 8)).sum().backward()
    return f"{before} {type(net._comm_hooks[0][1]).__name__}"


def main(folder: Path, names: list[str]) -> None:
    """Run the examples and write what they came to."""
    torch.set_num_threads(1)
    nn.modules.module.register_module_forward_pre_hook(wait_for_the_plan)
    found: dict[str, Any] = {}
    for name in names:
        try:
            first, second = globals()[name](folder)
            found[name] = {"first": seen(*first), "second": seen(*second)}
            first[2].close()
            second[2].close()
        except Exception:  # the others are to be seen as well
            found[name] = {"error": traceback.format_exc()}
        gc.collect()
    with contextlib.suppress(ValueError):
        dist.init_process_group("gloo")  # a framework may have done it
    os.environ["GRADPILOT_CONTROLLER"] = "off"
    found["plain model"] = plain_model()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

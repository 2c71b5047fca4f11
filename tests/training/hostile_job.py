"""Run by ``test_hygiene`` under torchrun and the wrapper: a job that does what real scripts do.

It forks workers beside the controller's session, defines its classes in the script, postpones its
annotations, starts a process that imports the script anew, and attaches its model itself although
the wrapper would. What it sees is written to a file for each rank.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import multiprocessing
import os
import pickle
import sys
import time
import typing
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Settings:
    """What the job is told, as scripts have it."""

    epochs: int = 3
    names: list[str] = dataclasses.field(default_factory=list)


def spawned(path: str, pickled: bytes) -> None:
    """Write what a process sees that imported this script anew."""
    settings = pickle.loads(pickled)
    Path(path).write_text(f"{type(settings).__name__} {settings.epochs} {'torch' in sys.modules}")


def compiled_and_named() -> dict[str, bool]:
    """Return what depends on how the script was compiled and under which name it runs."""
    module = sys.modules["__main__"]
    return {
        "postponed": Settings.__annotations__ == {"epochs": "int", "names": "list[str]"},
        "type hints": typing.get_type_hints(Settings) == {"epochs": int, "names": list[str]},
        "pickled": pickle.loads(pickle.dumps(Settings(5))) == Settings(5),
        "identity": getattr(module, "Settings", None) is Settings,
        "file": Path(str(module.__file__)).name == Path(__file__).name,
        "argv": sys.argv[0] == __file__ and len(sys.argv) == 2,
        "path": Path(sys.path[0]) == Path(__file__).resolve().parent,
    }


def pickle_at_exit(path: Path) -> None:
    """Write what a handler of the script sees when the interpreter ends."""
    path.write_text(str(pickle.loads(pickle.dumps(Settings(5))) == Settings(5)))


def train(folder: Path) -> None:
    """Train on batches of forked workers, then under every kind of option."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level
    from torch.utils.data import DataLoader

    import gradpilot
    from tests.training.forked import Forked
    from tests.worker_agent import training

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    atexit.register(pickle_at_exit, folder / f"exit{rank}")
    other = None
    if rank == 0:
        context = multiprocessing.get_context("spawn")
        arguments = (str(folder / "spawned"), pickle.dumps(Settings(7)))
        other = context.Process(target=spawned, args=arguments)
        other.start()
    found: dict[str, Any] = {"annotations": compiled_and_named()}

    net = training.wrap()
    handle = gradpilot.attach(net)
    assert handle._link is not None
    client = handle._link.client
    deadline = time.monotonic() + 15
    while not client.connected and time.monotonic() < deadline:
        time.sleep(0.01)
    loader = DataLoader(
        Forked(64), 4, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    workers = []
    begun = time.monotonic()
    for _ in range(Settings().epochs):
        pids = set()
        for batch, pid in loader:
            optimizer.zero_grad()
            net(batch + rank).square().mean().backward()
            optimizer.step()
            pids |= set(pid.tolist())
            time.sleep(0.02)
        workers.append(sorted(pids))
    # Plans change on all ranks at the same step, so all leave together.
    while handle.plan.key <= (0, 0) and handle.step < 600:
        training.backward(net, rank, handle.step)
        time.sleep(0.01)
    for _ in range(4):
        training.backward(net, rank, handle.step)
    found["workers"] = workers
    found["seconds"] = time.monotonic() - begun
    found["steps"] = handle.step
    found["option"] = handle.plan.options()[0].compressor
    found["sessions"] = (client.connected, client.counters.sessions)
    found["dropped"] = handle.counters.reports_dropped
    equal = training.same_everywhere(training.digest(training.gradients(net)))

    found["debug"] = [get_debug_level().name]
    detailed = training.wrap()
    # From here on torch wraps new groups, ours. Not before: with a wrapped gloo group of its own,
    # plain DDP of torch 2.13 dies by SIGSEGV where the model is wrapped.
    set_debug_level(DebugLevel.DETAIL)
    second = gradpilot.attach(detailed, controller="off", name="second")
    found["debug"].append(get_debug_level().name)
    for step, option in enumerate(o for o in training.OPTIONS * 2 if o.skip == 0):
        if second.layout is not None:
            second._coordinator.restore(training.uniform_plan(second, step, option))
        detailed.zero_grad()
        training.backward(detailed, rank, step)
        equal &= training.same_everywhere(training.digest(training.gradients(detailed)))
    found["equal"] = equal
    found["frozen"] = [handle.frozen, second.frozen]
    if other is not None:
        other.join(20)
        found["spawned"] = (folder / "spawned").read_text()
    found["hosts"] = [handle.controller.partition(":")[0], os.environ["http_proxy"]]
    (folder / f"result{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    train(Path(sys.argv[1]))

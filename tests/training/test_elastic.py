"""Jobs that are restarted, grow, shrink and are told to end.

A rank that is stopped by SIGSTOP and goes on is in ``tests/worker_agent/test_watchdog.py``.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradpilot
from gradpilot.diagnose import report
from gradpilot.operate import OperatorClient
from gradpilot.protos import codec
from gradpilot.protos.messages import DENSE, Hello, Option, RunRef
from gradpilot.protos.v1.controller_pb2_grpc import ControllerServiceStub
from gradpilot.worker_agent.handle import Handle
from tests.controller_process import running_controller, until
from tests.ranks import run_ranks
from tests.torchrun import torchrun
from tests.worker_agent import training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

TOPK = Option("topk", 0.1, "allgather")

# --- restart -------------------------------------------------------------------------------------

RESTARTED = """
import json, os, pathlib, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradpilot
from gradpilot.protos.messages import Option

folder, restarts = pathlib.Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if restarts and os.environ["RANK"] == "1":
    time.sleep(1.5)  # one late rank
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
ddp = DistributedDataParallel(net, bucket_cap_mb=0.01)
handle = gradpilot.attach(ddp, start=Option("topk", 0.1, "allgather"), dumps=str(folder / "dumps"))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
checkpoint, first = folder / f"rank{rank}.pt", 0
if checkpoint.exists():
    state = torch.load(checkpoint, weights_only=True)
    first = state["next"]
    net.load_state_dict(state["model"])
    handle.load_state_dict(state["agent"])
    assert handle.step == first and handle.plan.options()[0].compressor == "topk"
for step in range(first, 30):
    optimizer.zero_grad()
    ddp(torch.full((8, 64), 1.0 + rank)).square().mean().backward()
    optimizer.step()
    if step == 9:
        state = {"next": 10, "model": net.state_dict(), "agent": handle.state_dict()}
        torch.save(state, checkpoint)
        dist.barrier()
    if step == 14 and restarts == 0 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
weights = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
result = {"run": handle.run, "first": first, "steps": handle.step, "frozen": handle.frozen,
          "restarts": restarts, "sum": weights.sum().item()}
(folder / f"result{rank}.json").write_text(json.dumps(result))
deadline = time.monotonic() + 20
while not (folder / "stop").exists() and time.monotonic() < deadline:
    time.sleep(0.05)  # the test looks at the controller
"""


def _refusal(address: str, hello: Hello) -> tuple[grpc.StatusCode, str]:
    """Return how a controller answers a process that says this of itself."""
    with grpc.insecure_channel(address) as channel:
        call = ControllerServiceStub(channel).Session(iter([codec.encode_agent(hello)]), timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code(), str(caught.value.details())


def test_after_a_killed_rank_the_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    refused: list[tuple[grpc.StatusCode, str]] = []

    def call_from_the_first_start(address: str) -> None:
        """Say hello as a rank of the first start, while the second one is there."""
        try:
            results = [tmp_path / f"result{rank}.json" for rank in range(2)]
            until("the second start trained", lambda: all(r.exists() for r in results), 50)
            (start,) = (tmp_path / "dumps").iterdir()
            run, incarnation = start.name.split("@")
            with OperatorClient(address) as client:
                until("it is known", lambda: client.run(RunRef(run)).summary.ranks == 2)
            hello = Hello(run, "model", incarnation, 0, 2, agent_version=gradpilot.__version__)
            refused.append(_refusal(address, hello))
        finally:
            (tmp_path / "stop").touch()

    with running_controller(tmp_path) as controller:
        calling = threading.Thread(target=call_from_the_first_start, args=(controller.address,))
        calling.start()
        ended = torchrun(
            tmp_path,
            "--max-restarts=1",
            str(script),
            str(tmp_path),
            ranks=2,
            timeout=60,
            GRADPILOT_CONTROLLER=controller.address,
            # torchrun's store otherwise outlives a start, and torch 2.13 itself may then block in
            # init_process_group over gloo: a rank takes the address that a dead one left there.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        calling.join(60)
    assert ended.code == 0, ended.err
    assert ended.left == ()
    results = [json.loads((tmp_path / f"result{rank}.json").read_text()) for rank in range(2)]
    for result in results:
        assert (result["restarts"], result["first"], result["steps"]) == (1, 10, 30)
        assert result["frozen"] == ""
        assert result["sum"] == results[0]["sum"], "ranks are in sync"

    # The first start: what its watchers left names the rank that was killed.
    ((killed,), bad) = report(tmp_path / "dumps")
    assert bad == []
    assert killed.run == results[0]["run"], "the run id stays"
    assert (killed.odd, killed.findings[0].kind) == ((1,), "ended")
    assert [dump.steps for dump in killed.dumps if dump.rank == 1] == [15]
    ((code, why),) = refused
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "earlier start of the job" in why
    old, new = re.findall(r"'(\d+-[^']+)'", why)
    assert (old, old < new) == (killed.incarnation, True)


# --- another number of ranks ---------------------------------------------------------------------


def _size_of(net: DistributedDataParallel) -> dict[str, int]:
    return {name: p.numel() for name, p in net.module.named_parameters()}


def _residual_sum(handle: Handle, net: DistributedDataParallel) -> torch.Tensor:
    """Return the sum over ranks of all residuals, in parameter order."""
    held = handle.state_dict()["residuals"]
    total = torch.cat([held.get(n, torch.zeros(k)).double() for n, k in _size_of(net).items()])
    dist.all_reduce(total)
    return total


def _loaded(states: list[dict[str, Any]]) -> tuple[int, dict[str, torch.Tensor]]:
    """Return how many residuals a fresh handle drops of states, and which it has then."""
    handle = training.control(training.wrap(find_unused_parameters=True))
    handle.load_state_dict(states)
    found = handle.counters.residual_resets, handle.state_dict()["residuals"]
    handle.close()
    return found


def _resized(rank: int, files: list[bytes]) -> dict[str, Any]:
    """Load what all ranks of another job saved, send it with a dense step, compress again."""
    states = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    net = training.wrap(find_unused_parameters=True)
    handle = training.control(net, TOPK)
    first, found = 0, {}
    if states:
        first = states[0]["agent"]["step"]
        net.module.load_state_dict(states[0]["model"])
        handle.load_state_dict([state["agent"] for state in states])
        before = torch.zeros(sum(_size_of(net).values()), dtype=torch.float64)
        for state in states:
            held = state["agent"]["residuals"]
            before += torch.cat([held[name].double().flatten() for name in _size_of(net)])
        local = training.local_gradients(net, rank, first).double()
        dist.all_reduce(local)
        found = {
            "step": handle.step,
            "label": handle.plan.options()[0].label,
            "kept": float((_residual_sum(handle, net) - before).abs().max()),
            "size": float(before.abs().max()),
        }
        training.backward(net, rank, first)
        mean = (local + before) / dist.get_world_size()
        found["sent"] = float((training.gradients(net).double() - mean).abs().max())
        found["left"] = float(_residual_sum(handle, net).abs().max())
        handle._coordinator.restore(training.uniform_plan(handle, 1, TOPK))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(first + 1, first + 5):
        optimizer.zero_grad()
        training.backward(net, rank, step)
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    found["equal"] = training.same_everywhere(training.digest(weights))
    found["resets"] = handle.counters.residual_resets
    found["of some"] = _loaded([state["agent"] for state in states[:-1]]) if files else None
    saved: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(saved, handle.state_dict())
    dropped, held = _loaded(saved[::-1])
    own = saved[rank]["residuals"]
    found["finds its own"] = (dropped, held.keys()) == (0, own.keys()) and all(
        torch.equal(held[name], own[name]) for name in own
    )
    file = io.BytesIO()
    torch.save({"model": net.module.state_dict(), "agent": handle.state_dict()}, file)
    found["file"] = file.getvalue()
    return found


def test_growing_and_shrinking_keep_the_sum_of_the_residuals() -> None:
    """And with the states of some ranks only, residuals are dropped and counted."""
    parameters = len(list(training.model().parameters()))
    files: list[bytes] = []
    for world_size in (2, 4, 2):
        results = run_ranks(_resized, world_size, files)
        for result in results:
            assert result["equal"]
            assert result["resets"] == 0
            assert result["finds its own"], "in the states of as many ranks"
            if not files:
                continue
            assert result["of some"][1] == {}
            assert result["step"] in (4, 9)
            assert result["label"] == DENSE.label
            assert result["size"] > 0.01, "there is something to keep"
            assert result["kept"] < 1e-5 * result["size"]
            assert result["sent"] < 1e-4, "it is sent with the first step"
            assert result["left"] == 0.0
        if files:
            dropped = sum(result["of some"][0] for result in results)
            assert dropped == (len(files) - 1) * parameters if len(files) > 2 else dropped > 0
        files = [result["file"] for result in results]


# --- SIGTERM -------------------------------------------------------------------------------------

TERMINATED = """
import os, pathlib, signal, sys, threading
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradpilot

kind, folder = sys.argv[1], pathlib.Path(sys.argv[2])
torch.set_num_threads(1)

def handler(number, frame):
    print("saved", handle.state_dict()["step"] >= 20, flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))

if kind == "handler":
    signal.signal(signal.SIGTERM, handler)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
handle = gradpilot.attach(ddp, controller=sys.argv[3])
children = (handle._watchdog, handle._child)
(folder / "children").write_text(" ".join(str(p.pid) for p in children if p is not None))
for step in range(20000):
    ddp(torch.ones(2, 8)).sum().backward()
    if step == 20:
        print("ready", flush=True)
    threading.Event().wait(0.002)
"""


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def test_what_sigterm_does_is_the_users_decision(tmp_path: Path) -> None:
    """Without a handler the signal ends the process. A handler may save and go on, or exit."""
    script = tmp_path / "train.py"
    script.write_text(TERMINATED)
    jobs = {}
    for kind, controller in (("none", "off"), ("handler", "")):
        folder = tmp_path / kind
        folder.mkdir()
        jobs[kind] = subprocess.Popen(
            [sys.executable, str(script), kind, str(folder), controller],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        )
    try:
        for kind, process in jobs.items():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate(timeout=10)[1]
            if kind == "handler":
                process.terminate()
                assert process.stdout.readline() == "saved True\n"
                time.sleep(0.1)
                assert process.poll() is None, "it goes on"
            process.terminate()
            begun = time.monotonic()
            _, err = process.communicate(timeout=20)
            assert time.monotonic() - begun < 5.0, "2 s, and what a busy machine adds"
            assert process.returncode == (7 if kind == "handler" else -signal.SIGTERM), err
            children = [int(pid) for pid in (tmp_path / kind / "children").read_text().split()]
            assert len(children) == (2 if kind == "handler" else 1)
            deadline = time.monotonic() + 5
            while not all(map(_gone, children)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert all(map(_gone, children)), "neither watcher nor controller stays behind"
    finally:
        for process in jobs.values():
            process.kill()
            process.wait(5)

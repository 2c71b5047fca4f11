"""Run a function on N ranks over gloo, each in a process of its own, under a hard time limit."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

TIMEOUT_SECONDS = 45.0

# A fork of a clean server is 20 times faster than a fresh interpreter that imports torch, and
# unlike a fork of pytest it inherits neither threads nor grpc.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    # DDP imports torch._dynamo when a model is wrapped, FSDP itself: seconds on every rank.
    [
        "torch",
        "torch.distributed",
        "gradpilot.worker_agent.agent",
        "torch._dynamo",
        "torch.distributed.fsdp",
    ]
)


def run_ranks(
    target: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = TIMEOUT_SECONDS,
    expect_failure: bool = False,
    **env: str,
) -> list[Any]:
    """Call ``target(rank, *arguments)`` on every rank with the default group initialised.

    Args:
        target: Module-level function; its result must pickle.
        world_size: Number of ranks.
        *arguments: Passed on.
        timeout: Seconds after which all ranks are killed and the test fails.
        expect_failure: Return an exception's text in place of the result instead of failing.
        **env: Environment of the ranks.

    Returns:
        The results in rank order.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, processes, pipes = str(Path(folder) / "store"), [], []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_main, args=(target, rank, world_size, store, arguments, env, sender)
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(processes, pipes, timeout, expect_failure)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(5)


def _collect(
    processes: list[Any], pipes: list[Connection], timeout: float, expect_failure: bool
) -> list[Any]:
    deadline = time.monotonic() + timeout
    results, failures = [], []
    for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True)):
        if not pipe.poll(max(deadline - time.monotonic(), 0.0)):
            raise AssertionError(f"rank {rank} gave no result within {timeout:.0f} s")
        try:
            ok, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            process.join(5)
            ok, value = False, f"process ended with {process.exitcode}"
        results.append(value)
        if not ok:
            failures.append(f"rank {rank}: {value}")
    if failures and not expect_failure:
        raise AssertionError("\n".join(failures))
    if not failures:
        for rank, process in enumerate(processes):
            process.join(max(deadline - time.monotonic(), 1.0))
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
    return results


def _main(
    target: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    arguments: tuple[Any, ...],
    env: dict[str, str],
    pipe: Connection,
) -> None:
    from gradpilot.worker_agent.handle import close_all
    from gradpilot.worker_agent.teardown import leave_process_group

    torch.set_num_threads(1)
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo",
        store=FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    try:
        value = target(rank, *arguments)
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        os._exit(1)
    close_all()
    leave_process_group()
    # Plain pickling copies tensors; the connection's own would share them with a process that ends.
    pipe.send_bytes(pickle.dumps((True, value)))


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

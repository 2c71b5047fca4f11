"""Who this process is: the job, the same on all ranks, and the place, its own."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import gradpilot
from gradpilot.protos.messages import Hello, Plan

MAX_RUN = 128
"""Longest run id in characters."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks of one start of a job share; rank 0 proposes it and broadcasts it.

    Attributes:
        run: Run id, kept across restarts of the job where the environment allows.
        incarnation: Id of this start. Ids of later starts sort after those of earlier ones.
        source: Where the run id came from, for the log.
    """

    run: str
    incarnation: str
    source: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs.

    Attributes:
        node: Host name.
        local_rank: Rank on the node.
    """

    node: str
    local_rank: int


def propose(
    env: Mapping[str, str], run: str = "", *, now: float | None = None, entropy: bytes | None = None
) -> Job:
    """Return what rank 0 would call this job; other ranks must take rank 0's answer.

    The run id is the first of: ``run``, ``GRADPILOT_RUN``, the Slurm job, torchrun's ``--rdzv-id``
    (random under ``--standalone``, but kept across its restarts), a random one. Two jobs inside one
    Slurm allocation need ``GRADPILOT_RUN`` to be told apart.

    Args:
        env: Environment of the process.
        run: Run id given by the caller.
        now: Unix seconds; the present if not given.
        entropy: At least 8 random bytes; from the system if not given.
    """
    # Not from the random module: its state belongs to the user's program.
    entropy = os.urandom(8) if entropy is None else entropy
    now = time.time() if now is None else now
    # Restart counters differ between workers of one start (pytorch#135712), so the counter only
    # helps people; time and random bits of rank 0 make the id.
    restart = _clean(env.get("TORCHELASTIC_RESTART_COUNT", "")) or "0"
    incarnation = f"{int(1000 * now):013d}-{restart}-{entropy[:3].hex()}"

    elastic = _clean(env.get("TORCHELASTIC_RUN_ID", ""))
    slurm = _clean(env.get("SLURM_JOB_ID", ""))
    candidates = (
        (_clean(run), "argument"),
        (_clean(env.get("GRADPILOT_RUN", "")), "GRADPILOT_RUN"),
        (slurm and f"slurm-{slurm}", "SLURM_JOB_ID"),
        # "none" is torchrun's default: every job without an id would be the same run.
        ("" if elastic.lower() == "none" else elastic, "TORCHELASTIC_RUN_ID"),
        (f"run-{entropy[3:8].hex()}", "random"),
    )
    found, source = next((name, source) for name, source in candidates if name)
    return Job(found, incarnation, source)


def place(env: Mapping[str, str]) -> Place:
    """Return where this rank runs."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        text = env.get(name, "").strip()
        if text.isascii() and text.isdigit():
            return Place(socket.gethostname(), int(text))
    return Place(socket.gethostname(), 0)


def hello(
    job: Job,
    at: Place,
    *,
    model: str,
    rank: int,
    world_size: int,
    backend: str = "",
    device: str = "",
    emulated: bool = False,
    step: int = 0,
    plan: Plan | None = None,
) -> Hello:
    """Return the first message of a session, versions filled in; see ``messages.Hello``."""
    torch = sys.modules.get("torch")
    return Hello(
        run=job.run,
        model=model,
        incarnation=job.incarnation,
        rank=rank,
        world_size=world_size,
        node=at.node,
        local_rank=at.local_rank,
        agent_version=gradpilot.__version__,
        backend=backend,
        device=device,
        torch_version=str(torch.__version__) if torch else "",
        emulated=emulated,
        step=step,
        plan=plan,
    )


def _clean(text: str) -> str:
    """Keep what is printable, so that an odd variable cannot spoil logs and metrics."""
    return "".join(c for c in text.strip() if c.isprintable())[:MAX_RUN]

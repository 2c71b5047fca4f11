"""The first meeting of a model's ranks: what they share, and who is where."""

from __future__ import annotations

import collections
import json
import logging
import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from gradpilot.worker_agent import embedded, groups, identity
from gradpilot.worker_agent.config import AgentConfig
from gradpilot.worker_agent.nodes import Nodes, exchange_names

log = logging.getLogger("gradpilot.agent")

MEET_SECONDS = 10.0
"""How much longer than a controller may take to start the other ranks wait for the first."""

_meetings: collections.Counter[str] = collections.Counter()


@dataclass(frozen=True, slots=True)
class Met:
    """What came of the meeting.

    Attributes:
        job: The job, the same on all ranks.
        address: Address of the controller that this rank talks to, "" for none.
        metrics_url: Where an embedded controller serves its metrics, "" otherwise.
        child: The first rank's own controller.
        nodes: Nodes by rank.
    """

    job: identity.Job
    address: str
    metrics_url: str
    child: embedded.EmbeddedController | None
    nodes: Nodes


def meet(config: AgentConfig, ranks: list[int]) -> Met:
    """Let the first rank say what all ranks share, and every rank where it is; all ranks alike.

    Call ``groups.begin`` before.

    Args:
        config: Settings.
        ranks: Ranks of the model's group in the default group.

    Raises:
        RuntimeError: A rank did not come within the store's timeout.
    """
    child: embedded.EmbeddedController | None = None
    here = identity.place(os.environ)
    store = groups.store()
    members = ",".join(map(str, ranks))
    _meetings[members] += 1  # attaching is collective, so all ranks count alike
    key = f"gradpilot/meet/{members}/{_meetings[members]}"
    if ranks[0] == dist.get_rank():
        job = identity.propose(os.environ, config.run)
        address = "" if config.off else config.controller
        if config.embedded:
            child = embedded.start(config)
            address = child.grpc_address if child is not None else ""
        metrics_url = child.metrics_url if child is not None else ""
        shared = [job.run, job.incarnation, job.source, address, metrics_url, here.node]
        store.set(key, json.dumps(shared))
    # Not a broadcast: the control group's timeout is shorter than a controller may take to start.
    store.wait([key], timedelta(seconds=config.embedded_timeout_seconds + MEET_SECONDS))
    *names, address, metrics_url, node = json.loads(store.get(key))
    job = identity.Job(*names)
    if config.embedded and address and here.node != node:
        # An embedded controller listens on the loopback address of the first rank's node only.
        log.warning(
            "this rank is on another node than the embedded controller and sends it no"
            " measurements; set GRADPILOT_CONTROLLER to a controller that all nodes reach"
        )
        address = ""
    nodes = exchange_names(store, f"{key}/node", ranks.index(dist.get_rank()), len(ranks))
    return Met(job, address, metrics_url, child, nodes)

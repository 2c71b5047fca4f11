"""Which ranks share a node, and the groups for collectives inside one and across all."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradpilot.worker_agent import groups


@dataclass(frozen=True, slots=True)
class Nodes:
    """The node of every rank.

    Attributes:
        of: Number of the node by rank; nodes are numbered in the order of their first ranks.
    """

    of: tuple[int, ...]

    @property
    def count(self) -> int:
        """Return how many nodes there are."""
        return max(self.of) + 1

    @property
    def layered(self) -> bool:
        """Return whether there are several nodes, and several ranks on one of them."""
        return 1 < self.count < len(self.of)

    def members(self, node: int) -> list[int]:
        """Return the ranks of a node, ascending; the first is its leader."""
        return [rank for rank, number in enumerate(self.of) if number == node]

    def leaders(self) -> list[int]:
        """Return the leader of every node, by node."""
        return [self.of.index(node) for node in range(self.count)]


def number_nodes(names: Sequence[str]) -> Nodes:
    """Return the nodes of ranks whose nodes have these names, by rank."""
    numbers: dict[str, int] = {}
    return Nodes(tuple(numbers.setdefault(name, len(numbers)) for name in names))


def node_name(env: Mapping[str, str]) -> str:
    """Return what the ranks of this node have in common.

    The launcher knows best (torchrun starts one agent a node, also where all are one machine for a
    trial); without one it is the host name.
    """
    for variable in ("GROUP_RANK", "SLURM_NODEID"):
        if number := env.get(variable, "").strip():
            return f"{variable}={number}"
    return socket.gethostname()


class NodeTeams:
    """Groups of one rank in a job of several nodes; every rank of the model makes its own.

    Args:
        nodes: Nodes by rank within the model's group.
        ranks: Ranks of the model's group in the default group.
        rank: This rank within the model's group.
        backend: Backend of both groups.
    """

    def __init__(self, nodes: Nodes, ranks: Sequence[int], rank: int, backend: str) -> None:
        self.nodes = nodes
        self.node = nodes.of[rank]
        members, leaders = nodes.members(self.node), nodes.leaders()
        self.inside = groups.acquire([ranks[r] for r in members], backend)
        self.across: dist.ProcessGroup | None = None
        """Group of the leaders; None on the other ranks."""
        if rank in leaders:
            self.across = groups.acquire([ranks[r] for r in leaders], backend)

    @property
    def owned(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups to give back."""
        return (self.inside,) if self.across is None else (self.inside, self.across)


def exchange_names(store: Store, key: str, rank: int, world_size: int) -> Nodes:
    """Tell the own node to all ranks and learn theirs; all ranks alike.

    Raises:
        RuntimeError: A rank did not come within the store's timeout.
    """
    store.set(f"{key}/{rank}", node_name(os.environ))
    keys = [f"{key}/{number}" for number in range(world_size)]
    return number_nodes([bytes(name).decode() for name in store.multi_get(keys)])

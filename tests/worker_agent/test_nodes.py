from __future__ import annotations

import socket

import pytest
from torch._C._distributed_c10d import HashStore

from gradpilot.worker_agent.nodes import Nodes, exchange_names, node_name, number_nodes


def test_nodes_are_numbered_by_their_first_rank() -> None:
    nodes = number_nodes(["b", "b", "a", "b", "c"])
    assert nodes.of == (0, 0, 1, 0, 2)
    assert nodes.count == 3
    assert nodes.members(0) == [0, 1, 3]
    assert nodes.leaders() == [0, 2, 4]


@pytest.mark.parametrize(
    ("of", "layered"), [((0,), False), ((0, 0), False), ((0, 1), False), ((0, 0, 1), True)]
)
def test_layered_means_several_nodes_of_which_one_has_several_ranks(
    of: tuple[int, ...], layered: bool
) -> None:
    assert Nodes(of).layered is layered


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({"GROUP_RANK": "1", "SLURM_NODEID": "7"}, "GROUP_RANK=1"),
        ({"SLURM_NODEID": "7"}, "SLURM_NODEID=7"),
        ({"GROUP_RANK": " "}, socket.gethostname()),
        ({}, socket.gethostname()),
    ],
)
def test_the_launcher_knows_the_node(env: dict[str, str], name: str) -> None:
    assert node_name(env) == name


def test_names_are_exchanged_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set("k/0", "GROUP_RANK=0")
    store.set("k/2", "GROUP_RANK=0")
    monkeypatch.setenv("GROUP_RANK", "4")
    assert exchange_names(store, "k", 1, 3).of == (0, 1, 0)

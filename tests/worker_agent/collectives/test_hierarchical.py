"""Dense inside a node, the compressor across: against the compressor run on sums of nodes."""

from __future__ import annotations

import os

import pytest
import torch

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option, Setting
from gradpilot.worker_agent.nodes import Nodes
from gradpilot.worker_agent.plan import compile_option
from gradpilot.worker_agent.testing import average, gradients, relative_error, same_bits
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step
from tests.ranks import run_ranks
from tests.worker_agent import training

EVEN = Nodes((0, 0, 1, 1))
UNEVEN = Nodes((0, 1, 0, 0, 2))
OPTIONS = (
    Option("none", collective="hierarchical"),
    Option("bf16", collective="hierarchical"),
    Option("topk", 0.05, "hierarchical"),
    Option("artopk", 0.05, "hierarchical", settings=(Setting("selection", "var"),)),
)


def layered(option: Option, nodes: Nodes, grads: list[torch.Tensor], **more: object) -> VirtualStep:
    return virtual_step(option, grads, bucket="b", nodes=nodes, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.compressor)
def test_equals_the_compressor_on_the_sums_of_the_nodes(option: Option, nodes: Nodes) -> None:
    grads = gradients(4097, len(nodes.of))
    weight = nodes.count / len(grads)
    sums = [
        torch.stack([grads[r] * weight for r in nodes.members(node)]).sum(0)
        for node in range(nodes.count)
    ]
    flat = Option(
        option.compressor,
        option.ratio,
        "allgather" if option.compressor == "topk" else "native",
        settings=option.settings,
    )
    expected = virtual_step(flat, sums, bucket="b").mean
    step = layered(option, nodes, grads)
    assert relative_error(step.mean, expected) < 1e-5
    assert all(same_bits(e.mean, step.mean) for e in step.estimates)


@pytest.mark.parametrize("nodes", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.compressor)
def test_nothing_is_lost_over_many_steps(option: Option, nodes: Nodes) -> None:
    ranks = len(nodes.of)
    given, arrived = torch.zeros(257).double(), torch.zeros(257).double()
    residuals = None
    for number in range(20):
        grads = gradients(257, ranks, seed=number)
        step = layered(option, nodes, grads, residuals=residuals, step=number)
        residuals = step.residuals
        given += average(grads)
        arrived += step.mean.double()
    assert residuals is not None
    # The backend adds up in 16 bits, which no rank's residual can know of.
    tolerance = 4e-3 if option.compressor == "bf16" else 1e-5
    assert relative_error(arrived + average(residuals), given) < tolerance


def test_the_residual_of_a_node_lies_in_equal_parts_on_its_ranks() -> None:
    step = layered(OPTIONS[2], UNEVEN, gradients(257, 5))
    for node in range(UNEVEN.count):
        first, *others = (step.residuals[r] for r in UNEVEN.members(node))
        assert all(relative_error(other, first) < 1e-6 for other in others)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.compressor)
def test_nan_on_one_rank_reaches_all(option: Option) -> None:
    for odd in range(4):
        grads = gradients(257, 4)
        grads[odd][3] = torch.nan
        step = layered(option, EVEN, grads)
        assert not any(bool(e.mean.isfinite().all()) for e in step.estimates)


@pytest.mark.parametrize("nodes", [None, Nodes((0, 0, 0, 0)), Nodes((0, 1, 2, 3))])
def test_one_layer_is_refused(nodes: Nodes | None) -> None:
    with pytest.raises(ConfigError, match="hierarchical needs several nodes"):
        compile_option(OPTIONS[0], 4, nodes)


def _train(rank: int, option: Option) -> tuple[list[str], bool, str]:
    os.environ["GROUP_RANK"] = str(rank // 2)
    net = training.wrap()
    handle = training.control(net, option)
    seen = []
    for step in range(5):
        training.backward(net, rank, step)
        grads = training.gradients(net)
        seen.append(training.digest(grads))
        for p in net.parameters():
            p.grad = None
    alike = all(training.same_everywhere(one) for one in seen)
    frozen = handle.frozen
    handle.close()
    return seen, alike, frozen


@pytest.mark.processes
def test_over_process_groups_all_ranks_stay_alike() -> None:
    for option in (OPTIONS[1], OPTIONS[3]):
        results = run_ranks(_train, 4, option)
        assert all(alike and frozen == "" for _, alike, frozen in results)
        assert all(seen == results[0][0] for seen, _, _ in results)


def _one_step(rank: int) -> torch.Tensor:
    os.environ["GROUP_RANK"] = str(rank // 2)
    net = training.wrap()
    handle = training.control(net, OPTIONS[0])
    training.backward(net, rank, 0)
    grads = training.gradients(net)
    handle.close()
    return grads


def _plain_step(rank: int) -> torch.Tensor:
    net = training.wrap()
    training.backward(net, rank, 0)
    return training.gradients(net)


@pytest.mark.processes
def test_over_process_groups_it_is_the_mean_of_all_ranks() -> None:
    layered_mean, plain = run_ranks(_one_step, 4)[0], run_ranks(_plain_step, 4)[0]
    assert relative_error(layered_mean, plain) < 1e-6

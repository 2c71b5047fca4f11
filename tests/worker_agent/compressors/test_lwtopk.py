from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.errors import ConfigError
from gradpilot.protos.messages import Option
from gradpilot.worker_agent.compressors.lwtopk import LwTopK
from gradpilot.worker_agent.compressors.sent import Sparse
from gradpilot.worker_agent.testing import CompressorConformance, gradients
from gradpilot.worker_agent.virtual import VirtualStep, virtual_step


class TestLwTopK(CompressorConformance):
    compressors = (LwTopK(ratio=0.01), LwTopK(ratio=0.3))
    dense = (LwTopK(ratio=1.0),)


def step(ratio: float, lengths: list[int], world_size: int = 2) -> VirtualStep:
    return virtual_step(
        Option("lwtopk", ratio, "allgather"),
        gradients(sum(lengths), world_size),
        shapes=tuple(torch.Size([length]) for length in lengths),
    )


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    ratio=st.floats(0.001, 1.0),
)
@settings(deadline=None, max_examples=60)
def test_every_parameter_gets_its_own_top_k(lengths: list[int], ratio: float) -> None:
    grads = gradients(sum(lengths), 2)
    for grad, estimate in zip(grads, step(ratio, lengths).estimates, strict=True):
        expected, start = [], 0
        for part in torch.split(grad, lengths):
            k = min(part.numel(), max(1, int(ratio * part.numel())))
            order = part.abs().sort(descending=True, stable=True).indices[:k]
            expected += sorted(start + i for i in order.tolist())
            start += part.numel()
        assert isinstance(estimate.sent, Sparse)
        assert estimate.sent.indices.tolist() == expected
        assert torch.equal(estimate.sent.values, grad[estimate.sent.indices])


def test_small_gradients_do_not_wait_for_large_ones() -> None:
    grad = torch.cat([torch.full((100,), 1e-6), torch.full((100,), 1.0)])
    shapes = (torch.Size([100]), torch.Size([10, 10]))
    by_layer = virtual_step(Option("lwtopk", 0.1, "allgather"), [grad], shapes=shapes).mean
    by_bucket = virtual_step(Option("topk", 0.1, "allgather"), [grad], shapes=shapes).mean
    assert by_layer[:100].count_nonzero() == by_layer[100:].count_nonzero() == 10
    assert by_bucket[:100].count_nonzero() == 0


@pytest.mark.parametrize("shapes", [(), (torch.Size([25, 40]),)])
def test_one_parameter_is_plain_topk(shapes: tuple[torch.Size, ...]) -> None:
    grads = gradients(1000, 3)
    plain = virtual_step(Option("topk", 0.05, "allgather"), grads)
    layered = virtual_step(Option("lwtopk", 0.05, "allgather"), grads, shapes=shapes)
    assert torch.equal(plain.mean, layered.mean)
    assert plain.wire == layered.wire


def test_bytes_of_a_small_network() -> None:
    shapes = (torch.Size([300, 784]), torch.Size([300]), torch.Size([10, 300]), torch.Size([10]))
    n = sum(shape.numel() for shape in shapes)
    # k_l: floor(2352), floor(3), floor(30), at least 1.
    assert LwTopK(ratio=0.01).wire(n, shapes)[0].bytes == 8 * (2352 + 3 + 30 + 1)


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match="ratio must be a number"):
        LwTopK(ratio=0.0)
    with pytest.raises(ConfigError, match="2147483648 elements"):
        LwTopK().wire(1 << 31, (torch.Size([1 << 30]), torch.Size([1 << 30])))

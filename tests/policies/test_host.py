from __future__ import annotations

import numpy as np
import pytest

from gradpilot.policies.compute import ComputeModel
from gradpilot.policies.cost import coefficients
from gradpilot.policies.host import Host, find_host
from gradpilot.policies.problem import Space
from gradpilot.protos.messages import LinkEstimate, Option
from tests.policies import scenario

LINK = LinkEstimate(1e-3, 8e-9)


def host(compressor: str, collective: str, **fields: object) -> Host:
    found = find_host(scenario.inputs(**fields), compressor, (collective,))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("compressor", "collective"),
    [("topk", "allgather"), ("artopk", "native"), ("artopk", "ring"), ("none", "native")],
)
def test_as_the_space_of_the_adaptive_policy_has_it(compressor: str, collective: str) -> None:
    made = scenario.inputs()
    mine = host(compressor, collective)
    space = Space(made, LINK)
    for ratio in mine.grid():
        k = space.add(mine.option(ratio))
        assert k is not None
        assert space.table is not None
        one = np.array([ratio])
        assert mine.payload(one)[0] == pytest.approx(space.table.size[k])
        latency, transfer = mine.wire(one, LINK)
        assert latency[0] == pytest.approx(space.table.latency[k])
        assert transfer[0] == pytest.approx(space.table.transfer[k])
        assert mine.gain(one)[0] == pytest.approx(space.table.gain[k])
        codec = space.table.compress[k] + space.table.decompress[k]
        assert mine.codec_seconds(one)[0] == pytest.approx(codec)


def test_exact_bytes_and_times_at_the_ladder() -> None:
    mine = host("topk", "allgather", ranks=8)
    ratios = np.array([0.001, 0.1])
    assert mine.payload(ratios).tolist() == [[8000, 8000, 4000], [800_000, 800_000, 400_000]]
    latency, transfer = mine.wire(ratios, LINK)
    a, b = coefficients("all_gather", 8)
    assert latency == pytest.approx(np.full((2, 3), a * 1e-3))
    assert transfer == pytest.approx(b * 8e-9 * mine.payload(ratios))
    assert (mine.lowest, mine.highest) == (0.001, 0.1)
    assert (mine.clamp(1e-9), mine.clamp(0.02), mine.clamp(1.0)) == (0.001, 0.02, 0.1)
    assert mine.option(0.02) == Option("topk", 0.02, "allgather")
    assert mine.weights == pytest.approx([0.4, 0.4, 0.2])


def test_grid() -> None:
    mine = host("topk", "allgather", settings=scenario.settings(ratios=5))
    assert mine.grid().tolist() == pytest.approx([0.001, 0.00316, 0.01, 0.0316, 0.1])
    assert 0.02 in mine.grid((0.02,))


def test_what_was_never_timed_is_not_a_number() -> None:
    mine = host("topk", "allgather", compute=())
    assert np.isnan(mine.codec_seconds(np.array([0.01]))).all()
    assert ("topk", ()) not in ComputeModel(())


def test_found_only_where_agents_and_operator_allow() -> None:
    made = scenario.inputs()
    assert find_host(made, "powersgd", ("native",)) is None
    assert find_host(made, "topk", ("native",)) is None
    assert find_host(made, "artopk", ("native",), "var") is None
    best = find_host(made, "artopk", ("tree", "ring", "native"), "star")
    assert best is not None
    assert best.collective == "ring"
    plain = scenario.inputs(settings=scenario.settings(collectives=("native",)))
    assert find_host(plain, "topk", ("allgather",)) is None
    other = scenario.inputs(families=scenario.families((1, 2)))  # rounds of another layout
    assert find_host(other, "topk", ("allgather",)) is None

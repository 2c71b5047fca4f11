"""Advice against the timeline model on layouts that are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.policies.base import BucketState
from gradpilot.policies.bucket_advice import (
    MEGABYTES,
    MOST_BUCKETS,
    Buckets,
    advise,
    last_end,
    resize,
)
from gradpilot.policies.problem import Space
from gradpilot.policies.timeline import wire_end
from gradpilot.protos.messages import BF16, DENSE, LinkEstimate, Option
from tests.policies import scenario

LINK = LinkEstimate(1e-3, 8e-8)
MEGABYTE = 2**18
"""Elements of four bytes."""


def space_of(sizes: tuple[int, ...], ready: tuple[float, ...], *, ranks: int = 4) -> Space:
    """Return the space of a layout whose buckets become ready at these times."""
    inputs = scenario.inputs(sizes=sizes, ranks=ranks)
    states = tuple(
        replace(s, ready_seconds=at) for s, at in zip(inputs.buckets, ready, strict=True)
    )
    return Space(replace(inputs, buckets=states), LINK)


def row_of(space: Space, option: Option) -> np.ndarray:
    number = space.add(option)
    assert number is not None
    return np.full(len(space.inputs.layout.buckets), number)


def predicted(space: Space, option: Option) -> float:
    return float(space.evaluate(row_of(space, option)[None]).step_seconds[0])


@pytest.mark.parametrize(
    "option", [DENSE, BF16, Option("none", collective="ring"), Option("topk", 0.01, "allgather")],
    ids=lambda o: o.label,
)  # fmt: skip
def test_it_is_what_the_decision_would_predict_for_that_layout(option: Option) -> None:
    """Elements that become ready at one pace: then nothing is left to interpolation.

    But that each bucket keeps a whole number of elements.
    """
    rel = 1e-9 if option.ratio == 1 else 1e-3
    total, pace = 20 * MEGABYTE, 0.1 / (20 * MEGABYTE)

    def layout(size: int) -> Space:
        sizes = (size,) * (total // size)
        return space_of(sizes, tuple(pace * size * i for i in range(len(sizes))))

    present = layout(10 * MEGABYTE)
    found = {a.megabytes: a for a in advise(present, row_of(present, option))}
    assert set(found) == {1, 5, 25}  # 50 would be the same as 25: one bucket
    assert [found[m].buckets for m in (1, 5, 25)] == [20, 4, 1]
    for megabytes in (1, 5):
        other = layout(int(megabytes * MEGABYTE))
        assert found[megabytes].step_seconds == pytest.approx(predicted(other, option), rel=rel)
    # In one bucket nothing overlaps with backward: both buckets' bytes after the last element.
    alone = space_of((total,), (0.0,))
    assert found[25].step_seconds == pytest.approx(predicted(alone, option), rel=rel)


def test_plans_with_several_options_are_cut_where_the_buckets_are() -> None:
    present = space_of((4 * MEGABYTE, 4 * MEGABYTE), (0.0, 0.02))
    dense, topk = (row_of(present, o)[0] for o in (DENSE, Option("topk", 0.01, "allgather")))
    (one, *_) = advise(present, np.array([dense, topk]))
    assert (one.megabytes, one.buckets) == (1, 8)
    other = space_of((MEGABYTE,) * 8, tuple(0.005 * i for i in range(8)))
    numbers = [row_of(other, o)[0] for o in (DENSE, Option("topk", 0.01, "allgather"))]
    row = np.repeat(np.array(numbers), 4)
    assert one.step_seconds == pytest.approx(
        float(other.evaluate(row[None]).step_seconds[0]), rel=1e-3
    )


def test_half_precision_needs_half_the_buckets() -> None:
    inputs = scenario.inputs(sizes=(8 * MEGABYTE,))
    (bucket,) = inputs.layout.buckets
    halves = replace(inputs.layout, buckets=(replace(bucket, dtype="bfloat16"),))
    for layout, count in ((inputs.layout, 8), (halves, 4)):
        space = Space(replace(inputs, layout=layout), LINK)
        assert advise(space, row_of(space, DENSE))[0].buckets == count


def test_a_huge_model_is_not_cut_into_too_many() -> None:
    sizes = (2 * MOST_BUCKETS * MEGABYTE,)
    space = space_of(sizes, (0.0,))
    assert [a.megabytes for a in advise(space, row_of(space, DENSE))] == list(MEGABYTES[1:])


def test_a_compressor_that_was_never_timed_gives_no_advice() -> None:
    inputs = replace(scenario.inputs(), compute=())
    space = Space(inputs, LINK)
    assert advise(space, row_of(space, Option("topk", 0.01, "allgather"))) == ()
    assert advise(space, row_of(space, DENSE))


def test_resizing_by_hand() -> None:
    elements, ready, latency, transfer = np.array([[4.0, 4], [0, 4], [1, 3], [8, 4]])
    made = resize(elements, ready, latency, transfer, 3.0)
    assert made.elements.tolist() == [3, 3, 2]
    assert made.ready.tolist() == [-1, 2, 4]  # one element a second, also before the first bucket
    assert made.latency == pytest.approx([1, 1 / 3 + 2, 3])
    assert made.transfer == pytest.approx([6, 2 + 2, 2])


sizes = st.lists(st.integers(1, 10**7), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(1, 2 * 10**7), st.integers(0, 2**32 - 1))
def test_nothing_is_lost_by_resizing(elements: list[int], size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = max(size, sum(elements) // 500)
    ready = np.concatenate([[0.0], np.cumsum(rng.random(len(elements) - 1))])
    latency, transfer = rng.random((2, len(elements)))
    made = resize(np.array(elements, float), ready, latency, transfer, float(size))
    assert made.elements.sum() == pytest.approx(sum(elements))
    assert made.transfer.sum() == pytest.approx(transfer.sum())
    assert made.share.sum(axis=1) == pytest.approx(1)
    assert (np.diff(made.ready) >= -1e-12).all()
    assert made.ready[-1] == pytest.approx(ready[-1])
    assert (made.elements > 0).all()
    assert (made.elements <= size * (1 + 1e-9)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_the_end_is_that_of_the_timeline(count: int, at_once: int, seed: int) -> None:
    pipelined = at_once > 0
    rng = np.random.default_rng(seed)
    ready = np.concatenate([[0.0], np.cumsum(rng.exponential(1.0, count - 1))])
    latency, transfer, compress, decompress = rng.exponential(0.5, (4, count))
    made = Buckets(np.ones(count), ready, latency, transfer, np.eye(count))
    (wanted,) = wire_end(
        ready, compress[None], latency[None], transfer[None], decompress[None],
        np.array([pipelined]), max(at_once, 1),
    )  # fmt: skip
    found = last_end(made, compress, decompress, pipelined=pipelined, at_once=max(at_once, 1))
    assert found == pytest.approx(wanted)


def test_states_without_readiness_give_no_overlap() -> None:
    space = Space(replace(scenario.inputs(), buckets=(BucketState(),) * 3), LINK)
    found = advise(space, row_of(space, DENSE))
    assert found[0].step_seconds >= space.inputs.compute_seconds

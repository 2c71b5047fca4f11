from __future__ import annotations

from dataclasses import replace

import pytest

from gradpilot.policies.base import Inputs
from gradpilot.policies.dwell import FORGOTTEN_AFTER, Dwell, dwell, link_changed
from gradpilot.policies.history import Departure, History, near
from gradpilot.protos.messages import BF16, DENSE, LinkEstimate, Option
from tests.policies import scenario

TOPK = Option("topk", 0.01, "allgather")
ARTOPK = Option("artopk", 0.01, "native", settings=scenario.STAR)
LINK = LinkEstimate(1e-3, 8e-9)


def departure(left: Option, to: Option, step: int = 900, link: LinkEstimate = LINK) -> Departure:
    return Departure((left,), (to,), step, link.alpha_seconds, link.beta_seconds_per_byte)


def after(*departures: Departure, current: Option = ARTOPK) -> Inputs:
    """At step 1000, with a dwell of 20 steps."""
    base = scenario.inputs(current=current)
    return replace(base, history=History(base.layout.digest, departures=departures))


def test_it_doubles_with_every_return_and_is_bounded() -> None:
    waits = [
        dwell(after(*[departure(TOPK, ARTOPK)] * times), (TOPK,) * 3, LINK) for times in range(8)
    ]
    assert [wait.steps for wait in waits] == [20, 40, 80, 160, 320, 640, 640, 640]
    assert [wait.times_left for wait in waits] == list(range(8))


def test_it_concerns_what_was_left_and_what_is_nearly_the_same() -> None:
    inputs = after(departure(TOPK, ARTOPK))
    assert dwell(inputs, (replace(TOPK, ratio=0.012),) * 3, LINK).times_left == 1
    for other in (replace(TOPK, ratio=0.02), replace(TOPK, skip=1), BF16):
        assert dwell(inputs, (other,) * 3, LINK) == Dwell(20)
    assert dwell(inputs, (TOPK, TOPK, BF16), LINK) == Dwell(20)


def test_flight_from_compression_is_not_delayed_but_going_from_dense_to_bf16_is() -> None:
    assert dwell(after(departure(BF16, TOPK), current=TOPK), (BF16,) * 3, LINK) == Dwell(20)
    assert dwell(after(departure(BF16, DENSE), current=DENSE), (BF16,) * 3, LINK) == Dwell(40, 1)


@pytest.mark.parametrize(
    ("link", "changed"),
    [
        (LinkEstimate(1e-3, 8e-9), False),
        (LinkEstimate(1.3e-3, 6e-9), False),
        (LinkEstimate(1e-3, 16e-9), True),
        (LinkEstimate(1e-3, 4e-9), True),
        (LinkEstimate(3e-3, 8e-9), True),
        (LinkEstimate(0.0, 8e-9), True),
    ],
)
def test_another_link_is_a_new_beginning(link: LinkEstimate, changed: bool) -> None:
    inputs = after(departure(TOPK, ARTOPK))
    assert link_changed(inputs.history.departures[0], link, inputs) is changed
    assert dwell(inputs, (TOPK,) * 3, link).times_left == (0 if changed else 1)


def test_latency_too_small_to_matter_does_not_change_the_link() -> None:
    inputs = after()
    tiny = departure(TOPK, ARTOPK, link=LinkEstimate(1e-7, 8e-8))
    assert not link_changed(tiny, LinkEstimate(5e-6, 8e-8), inputs)


def test_another_layout_and_time_are_new_beginnings() -> None:
    inputs = after(departure(TOPK, ARTOPK))
    moved = replace(inputs, layout=scenario.layout((5, 6, 7)))
    assert dwell(moved, (TOPK,) * 3, LINK) == Dwell(20)
    late = replace(inputs, step=900 + FORGOTTEN_AFTER * 20)
    assert dwell(late, (TOPK,) * 3, LINK) == Dwell(20)
    assert dwell(replace(late, step=late.step - 1), (TOPK,) * 3, LINK) == Dwell(40, 1)


def test_near() -> None:
    assert near((TOPK, BF16), (replace(TOPK, ratio=0.0149), BF16))
    assert not near((TOPK, BF16), (BF16, TOPK))
    assert not near((TOPK,), (TOPK, BF16))
    assert not near((replace(TOPK, ratio=float("nan")),), (TOPK,))

from __future__ import annotations

import random

import pytest

from gradpilot.worker_agent.native_timing import Busy, NativeTimer


def timed(at_once: int, *events: tuple[str, int, float]) -> dict[int, Busy]:
    """Play ("in" or "end", number, time) and return what each collective took."""
    timer, found = NativeTimer(at_once), {}
    for what, number, now in events:
        if what == "in":
            assert timer.hand_in(now) == number
        else:
            found[number] = timer.end(number, now)
    return found


def test_alone_it_is_the_time_from_handing_in() -> None:
    found = timed(2, ("in", 1, 1.0), ("end", 1, 3.0), ("in", 2, 5.0), ("end", 2, 8.0))
    assert found == {1: Busy(2.0, 0.0), 2: Busy(3.0, 0.0)}


def test_in_a_stream_each_begins_when_the_one_before_ends() -> None:
    handed = [("in", n, 0.0) for n in (1, 2, 3)]
    found = timed(1, *handed, ("end", 1, 7.0), ("end", 2, 14.0), ("end", 3, 21.0))
    assert set(found.values()) == {Busy(7.0, 0.0)}


def test_of_two_at_once_the_third_waits_for_the_first() -> None:
    """Latency 5, one second of bytes each: the second shows its bytes, and what went beside."""
    handed = [("in", n, 0.0) for n in (1, 2, 3)]
    found = timed(2, *handed, ("end", 1, 6.0), ("end", 2, 7.0), ("end", 3, 12.0))
    assert found == {1: Busy(6.0, 0.0), 2: Busy(1.0, 6.0), 3: Busy(5.0, 1.0)}


def test_one_that_overtakes_tells_nothing_of_itself() -> None:
    found = timed(2, ("in", 1, 0.0), ("in", 2, 1.0), ("end", 2, 4.0), ("end", 1, 6.0))
    assert found == {2: Busy(0.0, 3.0), 1: Busy(6.0, 0.0)}


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_parts_add_up_over_a_long_run(at_once: int) -> None:
    """Whatever happens: no negative part, and nothing is counted twice as time on the wire."""
    draw = random.Random(at_once)
    timer = NativeTimer(at_once)
    now, total = 0.0, 0.0
    under_way: list[int] = []
    for _ in range(2000):
        now += draw.random()
        if under_way and draw.random() < 0.5:
            busy = timer.end(under_way.pop(draw.randrange(min(at_once, len(under_way)))), now)
            assert busy.seconds >= 0
            assert busy.overlapped >= 0
            total += busy.seconds
        else:
            under_way.append(timer.hand_in(now))
    assert 0 < total <= now + 1e-9

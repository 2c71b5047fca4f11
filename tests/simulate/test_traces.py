from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpilot.errors import ConfigError
from gradpilot.simulate.traces import (
    GBPS,
    MAKERS,
    Link,
    Trace,
    constant,
    format_trace,
    make_trace,
    parse_trace,
    read_trace,
)

NAMES = ("constant", *MAKERS)


@given(name=st.sampled_from(NAMES), seed=st.integers(0, 1000), at=st.floats(0, 1e5))
@settings(deadline=None, max_examples=60)
def test_the_link_holds_until_the_next_change(name: str, seed: int, at: float) -> None:
    trace = make_trace(name, seed, 700.0)
    link, change = trace.at(at), trace.next_change(at)
    assert link.alpha > 0
    assert link.beta > 0
    assert change > at - 1e-6
    if math.isfinite(change):
        assert trace.at(at + 0.99 * max(change - at, 0)) == link
        assert trace.at(change) == trace.at(change + 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_seeds_decide(name: str) -> None:
    assert make_trace(name, 3, 100.0) == make_trace(name, 3, 100.0)
    if name not in ("c1", "c2"):
        assert make_trace(name, 3, 100.0) != make_trace(name, 4, 100.0)


def test_time_going_on_by_changes_never_gets_stuck() -> None:
    trace = make_trace("walk", 0, 333.3)
    now = 0.0
    for _ in range(1000):
        after = trace.next_change(now)
        assert after > now
        now = after
    assert now > 5 * trace.period


def test_the_published_schedules() -> None:
    c1 = make_trace("c1", 0, 50.0)  # a second an epoch
    for seconds, ms, gbps in ((0, 1, 25), (11.9, 1, 25), (12.1, 1, 1), (25, 50, 1), (40, 50, 25)):
        assert c1.at(seconds) == Link.of(ms, gbps)
    c2 = make_trace("c2", 0, 500.0)
    for seconds, ms, gbps in ((250, 32, 1), (170, 16, 5), (290, 16, 5), (445, 1, 25)):
        assert c2.at(seconds) == Link.of(ms, gbps)


def test_bursts_are_short_collapses() -> None:
    trace = make_trace("burst", 5, 1200.0)
    good, bad = trace.links[0], max(trace.links, key=lambda link: link.beta)
    assert bad.beta == pytest.approx(10 * good.beta)
    ends = (*trace.starts[1:], trace.period)
    lasted = [e - s for s, e, k in zip(trace.starts, ends, trace.links, strict=True) if k == bad]
    assert sum(lasted) < 0.2 * trace.period


@given(seed=st.integers(0, 1000), name=st.sampled_from(NAMES))
@settings(deadline=None, max_examples=30)
def test_csv_comes_back(seed: int, name: str) -> None:
    trace = make_trace(name, seed, 100.0)
    again = parse_trace(format_trace(trace), "again")
    assert again.starts == trace.starts
    for old, new in zip(trace.links, again.links, strict=True):
        assert (new.alpha, new.beta) == pytest.approx((old.alpha, old.beta), rel=1e-12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected seconds,alpha_ms,gbps"),
        ("a,b\n", "line 1"),
        ("seconds,alpha_ms,gbps\n", "at least one row"),
        ("seconds,alpha_ms,gbps\n1,1,1\n", "line 2: seconds must be 0"),
        ("seconds,alpha_ms,gbps\n0,1,1\n\n0,1,1\n", "line 4: seconds must be more than 0"),
        ("seconds,alpha_ms,gbps\n0,1,1\n5,x,1\n", "line 3: alpha_ms must be a finite number"),
        ("seconds,alpha_ms,gbps\n0,1,0\n", "line 2: needs alpha_ms >= 0 and gbps > 0"),
        ("seconds,alpha_ms,gbps\n0,1\n", "line 2: expected 3 numbers, got 2"),
        ("seconds,alpha_ms,gbps\n0,1,nan\n", "line 2: gbps"),
    ],
)
def test_bad_files_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_trace(text, "file.csv")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("seconds,alpha_ms,gbps\n0,1,10\n60,5,0.5\n")
    trace = make_trace(str(path), 0, 1.0)
    assert trace.at(59) == Link(1e-3, 1 / (10 * GBPS))
    assert trace.at(1e9) == Link(5e-3, 1 / (0.5 * GBPS))
    with pytest.raises(ConfigError, match=r"missing\.csv"):
        read_trace(tmp_path / "missing.csv")


def test_impossible_traces_are_refused() -> None:
    link = Link.of(1, 1)
    for starts, period in (((1.0,), 9.0), ((0.0, 0.0), 9.0), ((0.0, 5.0), 5.0)):
        with pytest.raises(ConfigError):
            Trace("bad", starts, (link,) * len(starts), period)
    with pytest.raises(ConfigError, match=r"unknown trace 'nothing'.*steps"):
        make_trace("nothing", 0, 1.0)
    with pytest.raises(ConfigError, match="longer than 0"):
        make_trace("walk", 0, 0.0)
    assert constant(1, 1).next_change(0) == math.inf

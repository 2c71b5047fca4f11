"""What there is to say of a running lab."""

from __future__ import annotations

from typing import Any

from bench.netlab import counters, names
from bench.netlab.control import Helper
from bench.netlab.errors import HelperError
from bench.netlab.state import State
from bench.netlab.system import list_namespaces

LATE_MS = 5.0
"""A packet released later than this is worth telling."""


def describe(state: State) -> dict[str, Any]:
    """Return settings, counters, the processes' own words, and ``problems`` in words."""
    there = set(list_namespaces())
    expected = [names.hub(state.name), *(names.host(state.name, i) for i in range(state.hosts))]
    problems = [f"namespace {space} is gone" for space in expected if space not in there]
    hosts: list[dict[str, Any]] = [
        {
            "host": i,
            "address": names.address(i),
            "namespace": names.host(state.name, i),
            "rate_mbit": link.rate_mbit,
            "rtt_ms": link.rtt_ms,
        }
        for i, link in enumerate(state.links)
    ]
    if not problems:
        for row, counted in zip(hosts, counters.read(state), strict=True):
            row |= {name: getattr(counted, name) for name in counted.__slots__}
    delay = _words(state.name, "delay", problems) if state.queued else None
    if delay is not None:
        if delay["seconds"] != state.delays:
            problems.append("the delay process has other delays than were asked for: set again")
        if not delay["real_time"]:
            problems.append("the delay process has no real-time priority, so it may be late")
        late = max(delay["late_most_us"]) / 1e3
        if late > LATE_MS:
            problems.append(f"a packet was released {late:.1f} ms late; the machine is busy")
    flows = state.flows
    return {
        "name": state.name,
        "mtu": state.mtu,
        "congestion": state.congestion,
        "hosts": hosts,
        "machine_rtt_ms": state.machine_rtt_ms,
        "delay": delay,
        "flows": flows,
        "background": _words(state.name, "background", problems) if flows else None,
        "problems": problems,
    }


def _words(name: str, kind: str, problems: list[str]) -> dict[str, Any] | None:
    """Return what a helper says of itself, or note why it does not."""
    helper = Helper(name, kind)
    process = helper.process()
    if process is None:
        lost = "nothing gets through" if kind == "delay" else "there is none"
        problems.append(f"the {kind} process has ended, so {lost}: take the lab down and up again")
        return None
    try:
        words = helper.ask()
    except HelperError as error:
        problems.append(str(error))
        return None
    return {"pid": process.pid, "cpu_seconds": round(process.cpu_seconds(), 3), **words}

"""The parts of netlab that need neither root nor a network."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import results_file
from bench.netlab import (
    BadRequestError,
    Change,
    CommandError,
    Lab,
    Link,
    Measured,
    NetlabError,
    NoLabError,
    Replay,
    Trace,
    UnsupportedError,
    measure,
    names,
)
from bench.netlab.background import Flow
from bench.netlab.checks import wire_share
from bench.netlab.counters import Counters, frames_carried
from bench.netlab.delay import MOST_LEAD, Lead, Line
from bench.netlab.link import between, parse_flow, parse_number
from bench.netlab.nfqueue import _packet
from bench.netlab.processes import Process
from bench.netlab.state import State, locked
from bench.netlab.system import command, missing, require
from tests.project import ROOT


def test_it_needs_python_alone_and_does_not_know_gradpilot() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
        "import bench.netlab.__main__; names = {name.partition('.')[0] for name in sys.modules}; "
        "print(*names - sys.stdlib_module_names)"
    )
    # -S: without the packages of the environment, which would be there to be found.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= {"bench", "__main__"}


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", "a b", "a/b", "../a", "a" * 17, "lab\n"])
def test_names_that_could_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match="1 to 16"):
        Lab(name)


def test_a_lab_owns_its_namespaces_and_no_others() -> None:
    for space in (names.hub("demo"), names.host("demo", 0), names.host("demo", 12)):
        assert names.belongs(space, "demo")
        assert not names.belongs(space, "dem")
        assert not names.belongs(space, "demo1")
    for space in ("demo-hub", "netlab-demo-h", "netlab-demo-hx", "netlab-demo-hub2", "netlab-h1"):
        assert not names.belongs(space, "demo")


# --- links ---------------------------------------------------------------------------------------


def test_a_link_in_the_words_of_tc() -> None:
    add = Link(rate_mbit=1000).shaping("eth0", "add")
    assert add[0] == "qdisc add dev eth0 root handle 1: htb default 1"
    assert "rate 1000000000bit ceil 1000000000bit burst 12500 cburst 12500" in add[1]
    assert add[2].endswith("bfifo limit 6250000")  # 50 ms
    change = Link(rate_mbit=0.5).shaping("p1", "change")
    assert len(change) == 2
    assert "class change dev p1" in change[0]
    assert "rate 500000bit ceil 500000bit burst 3200" in change[0]
    assert change[1].endswith("bfifo limit 524288")


@pytest.mark.parametrize(
    "fields",
    [
        {"rate_mbit": 0},
        {"rate_mbit": float("nan")},
        {"rate_mbit": 1e6},
        {"rtt_ms": -1},
        {"rtt_ms": float("nan")},
        {"rtt_ms": 2001},
    ],
)
def test_links_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(BadRequestError, match="got"):
        Link(**fields)


def test_two_hosts_have_the_lesser_rate_and_the_mean_round_trip() -> None:
    slow, fast = Link(rate_mbit=10, rtt_ms=30), Link(rate_mbit=100, rtt_ms=10)
    assert between(slow, fast) == between(fast, slow) == Link(rate_mbit=10, rtt_ms=20)
    assert slow.one_way_seconds + fast.one_way_seconds == pytest.approx(0.02)
    assert fast.changed(None, 4) == Link(rate_mbit=100, rtt_ms=4)


@pytest.mark.parametrize("text", ["0", "0-", "-1", "0-0", "a-b", "0-1-2", "0>1"])
def test_flows_that_are_none(text: str) -> None:
    with pytest.raises(BadRequestError, match="FROM-TO"):
        parse_flow(text)


def test_numbers() -> None:
    assert parse_number("2.5", "x") == 2.5
    for text in ("", "x", "-1", "nan", "inf"):
        with pytest.raises(BadRequestError, match="its rate must be a number"):
            parse_number(text, "its rate")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"hosts": 1}, "2 to 100"),
        ({"hosts": 3, "link": [Link()]}, "as many links"),
        ({"mtu": 100}, "MTU"),
    ],
)
def test_labs_that_make_no_sense(options: dict[str, int], word: str) -> None:
    with pytest.raises(BadRequestError, match=word):
        Lab("demo", **options)  # type: ignore[arg-type]


# --- traces --------------------------------------------------------------------------------------

HEAD = "seconds,host,rate_mbit,rtt_ms\n"


def test_a_trace() -> None:
    trace = Trace.parse(HEAD + "# a comment\n0,*,500,1\n\n10, 2,50,\n10,0-1,200,\n20.5,*,,5\n")
    assert trace.changes == (
        Change(0, None, None, 500, 1),
        Change(10, 2, None, 50, None),
        Change(10, None, (0, 1), 200, None),
        Change(20.5, None, None, None, 5),
    )
    assert trace.seconds == 20.5
    assert [(when, len(group)) for when, group in trace.groups()] == [(0, 1), (10, 2), (20.5, 1)]
    trace.check(3)
    with pytest.raises(BadRequestError, match=r"hosts are 0 to 1, but the trace names \[2\]"):
        trace.check(2)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "must begin with"),
        ("seconds,host\n0,1\n", "must begin with"),
        (HEAD, "no row"),
        (HEAD + "0,*,5\n", "line 2: expected 4 cells, got 3"),
        (HEAD + "x,*,5,\n", "line 2: seconds must be a number"),
        (HEAD + "0,*,,\n", "line 2: .*nothing would change"),
        (HEAD + "0,a,5,\n", r"line 2: host must be a number, \* or FROM-TO"),
        (HEAD + "0,0-1,,\n", "line 2: background traffic has a rate"),
        (HEAD + "0,0-1,5,1\n", "line 2: background traffic has a rate"),
        (HEAD + "0,*,0,\n", "line 2: a rate is"),
        (HEAD + "0,*,-1,\n", "line 2: rate_mbit must be a number"),
        (HEAD + "0,*,1,9999\n", "line 2: a round trip is"),
        (HEAD + "5,*,1,\n#\n4,*,1,\n", "line 4: time must not go back, 4 s comes after 5 s"),
    ],
)
def test_traces_that_are_wrong_say_where(text: str, word: str) -> None:
    with pytest.raises(BadRequestError, match=word):
        Trace.parse(text)


def test_changes_that_make_no_sense() -> None:
    for flow, rate in (((0, 0), 5.0), ((0, 1), -5.0), ((0, 1), float("nan")), ((0, 1), None)):
        with pytest.raises(BadRequestError, match="background traffic"):
            Change(0, None, flow, rate, None)
    with pytest.raises(BadRequestError, match="nothing would change"):
        Change(0, 1, None, None, None)
    with pytest.raises(BadRequestError, match=r"hosts are 0 to 1, but the trace names \[-1\]"):
        Trace((Change(0, -1, None, 5, None),)).check(2)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="cannot be read"):
        Trace.read(tmp_path / "none.csv")


def test_a_replay_follows_its_trace_and_starts_over() -> None:
    seen: list[float] = []
    trace = Trace.parse(HEAD + "0,*,1,\n0.02,*,2,\n0.02,*,3,\n")
    replay = Replay(trace, lambda changes: seen.extend(c.rate_mbit or 0 for c in changes), 0.05)
    deadline = time.monotonic() + 10
    while len(replay.applied) < 5 and time.monotonic() < deadline:
        assert not replay.wait(0.005)
    replay.stop()
    assert seen[:9] == [1, 2, 3, 1, 2, 3, 1, *seen[7:9]]
    for one, asked in zip(replay.applied, (0, 0.02, 0.05, 0.07, 0.1), strict=False):
        assert one.asked_seconds == pytest.approx(asked)
        assert one.done_seconds >= asked


def test_a_replay_ends_by_itself_or_with_the_error_of_a_change() -> None:
    trace = Trace.parse(HEAD + "0,*,1,\n")
    assert Replay(trace, lambda changes: None).wait(10)

    def fail(changes: list[Change]) -> None:
        raise CommandError("no")

    with pytest.raises(CommandError, match="no"):
        Replay(trace, fail).wait(10)
    with pytest.raises(BadRequestError, match="longer than"):
        Replay(trace, fail, loop_seconds=0)


# --- delay ---------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.floats(0, 0.01), st.floats(0, 0.02), st.booleans()), min_size=1, max_size=60
    )
)
@settings(deadline=None, max_examples=80)
def test_packets_never_overtake_and_none_is_early(
    steps: list[tuple[float, float, bool]],
) -> None:
    line, now, out = Line(), 100.0, 0
    asked: dict[int, float] = {}
    for number, (pause, delay, looks) in enumerate(steps, 1):
        now += pause
        line.delay = delay
        line.arrive(number, now)
        asked[number] = now + delay
        if looks and line.waiting[0][0] <= now:
            last = line.release(now)
            assert all(asked[i] <= now for i in range(out + 1, last + 1))
            out = last
    if line.waiting:
        out = line.release(now + 1)
    assert out == line.packets == len(steps)
    assert not line.waiting


def test_the_lead_becomes_the_median_lateness_and_ignores_stalls() -> None:
    lead = Lead()
    for i in range(400):
        # A wake-up comes 120 us after the time that was asked for; every tenth, 50 ms after.
        lead.learn((0.05 if i % 10 == 0 else 120e-6) - lead.seconds)
    assert lead.seconds == pytest.approx(120e-6, abs=10e-6)
    for _ in range(1000):
        lead.learn(1.0)
    assert lead.seconds == MOST_LEAD
    for _ in range(1000):
        lead.learn(-1.0)
    assert lead.seconds == 0


def test_a_message_of_the_kernel() -> None:
    header = struct.pack("=HH", 11, 1) + struct.pack("!IHBx", 77, 0x0800, 0)
    device = struct.pack("=HHI", 8, 5, 2)
    stamp = struct.pack("=HH", 20, 4) + struct.pack("!QQ", 1_700_000_000, 250_000)
    data = bytes(20) + header + device + stamp
    assert _packet(data, 20, len(data)) == (77, 1_700_000_000.25)
    assert _packet(data[:-20], 20, len(data) - 20) == (77, 0.0)


# --- background traffic and counters -------------------------------------------------------------


class FakeSocket:
    """Counts what is sent; refuses when told to."""

    def __init__(self) -> None:
        self.sent, self.full = 0, False

    def send(self, data: memoryview) -> int:
        if self.full:
            raise BlockingIOError
        self.sent += len(data)
        return len(data)


@pytest.mark.parametrize("mbit", [0.5, 20, 900])
def test_background_traffic_keeps_its_rate(mbit: float) -> None:
    wire = FakeSocket()
    flow = Flow(wire, mtu=1500)  # type: ignore[arg-type]
    flow.set(mbit * 1e6 / 8, 0.0)
    now, wakes = 0.0, 0
    while now < 10:
        due = flow.due()
        assert due is not None
        now = max(now, due) + 1e-4
        flow.send(now)
        wakes += 1
    assert flow.frames * 1514 * 8e-6 / now == pytest.approx(mbit, rel=0.02)
    assert wire.sent == flow.frames * 1472
    # About every 2 ms, as whole frames allow, or with every packet as large as the kernel takes.
    assert wakes < 10 / min(1.3e-3, 0.9 * 42 * 1514 * 8e-6 / mbit)
    wire.full = True
    flow.send(now + 0.1)
    assert flow.refused
    flow.set(0, now)
    assert flow.due() is None


def test_frames_of_a_drop_rule() -> None:
    rules = (
        "-P PREROUTING ACCEPT -c 9 9\n"
        "-A PREROUTING -s 10.77.0.12/32 -i eth0 -p udp -m udp --dport 9 -c 1 1500 -j DROP\n"
        "-A PREROUTING -s 10.77.0.1/32 -i eth0 -p udp -m udp --dport 9 -c 3 88404 -j DROP\n"
    )
    assert frames_carried(rules, "10.77.0.1", 1500) == (88404 - 3 * 28) / 1472 == 60
    assert frames_carried(rules, "10.77.0.12", 1500) == 1
    assert frames_carried(rules, "10.77.0.3", 1500) == 0


def test_counters_subtract_but_what_waits_is_now() -> None:
    early, late = Counters(1, 2, 3, 4, 5, 6), Counters(11, 22, 33, 44, 55, 66)
    assert late - early == Counters(10, 20, 30, 40, 50, 66)


# --- what a check says ---------------------------------------------------------------------------

AS_ASKED = Measured(0, 1, 100, 99, 5, 5.2, 5.4, 0.05)


def test_a_check_holds_to_five_and_ten_per_cent_and_gives_both_numbers() -> None:
    assert AS_ASKED.problems() == []
    (slow,) = replace(AS_ASKED, measured_mbit=94.9).problems()
    assert "asked for 100 Mbit/s, measured 94.9" in slow
    assert replace(AS_ASKED, measured_mbit=95.1).problems() == []
    (late,) = replace(AS_ASKED, measured_rtt_ms=5.51).problems()
    assert "asked for a round trip of 5 ms, measured 5.510 (+10.2%, allowed 10%)" in late
    assert len(replace(AS_ASKED, measured_mbit=106, measured_rtt_ms=4.4).problems()) == 2
    nothing = replace(AS_ASKED, measured_mbit=float("nan"), measured_rtt_ms=float("nan"))
    assert len(nothing.problems()) == 2


def test_without_a_round_trip_the_machine_may_need_half_a_millisecond() -> None:
    idle = replace(AS_ASKED, asked_rtt_ms=0, measured_rtt_ms=0.05)
    assert idle.problems() == []
    assert "no delay" in replace(idle, measured_rtt_ms=0.51).problems()[0]


def test_the_share_of_payload() -> None:
    assert wire_share(1500) == 1448 / 1514


def test_the_document_has_the_table_of_the_committed_results() -> None:
    results = json.loads((results_file.RESULTS / "netlab.json").read_text(encoding="utf-8"))
    table = measure.table(results["rows"])
    assert len(table.splitlines()) == 2 + len(measure.NETWORKS)
    document = (ROOT / "docs" / "netlab.md").read_text(encoding="utf-8")
    assert table in document
    for one in results["verdicts"]:
        assert one["holds"] or one["name"] in document, f"{one} needs its cause in docs/netlab.md"


# --- processes, state, machine -------------------------------------------------------------------


def test_a_process_is_ended_only_if_it_is_still_that_one() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        process = Process.of(child.pid)
        assert process is not None
        other = replace(process, started=process.started - 1)
        assert process.alive()
        assert not other.alive()
        assert not other.end()
        assert not process.end(namespace=(0, 0))
        assert process.alive()
        assert process.end()
        assert child.wait(10) == -signal.SIGTERM
        assert not process.end()


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = Process.of(child.pid)
        assert process is not None
        process.end(0.05)
        assert child.wait(10) == -signal.SIGKILL


def test_pid_files(tmp_path: Path) -> None:
    me = Process.of(os.getpid())
    assert me is not None
    assert me.cpu_seconds() > 0
    me.write(tmp_path / "pid")
    assert Process.read(tmp_path / "pid") == me
    (tmp_path / "pid").write_text("nonsense")
    assert Process.read(tmp_path / "pid") is None
    assert Process.read(tmp_path / "none") is None


def test_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "RUN", tmp_path)
    with pytest.raises(NoLabError, match="there is no lab 'demo'"):
        State.load("demo")
    state = State("demo", 1500, "cubic", [Link(rate_mbit=5), Link(rtt_ms=2)], {"0-1": 3.0}, True)
    state.machine_rtt_ms = 0.1
    assert state.delays == [0, pytest.approx(0.00095)]
    state.save()
    with pytest.raises(NoLabError, match="did not come up"):
        State.load("demo")
    state.complete = True
    state.save()
    assert State.load("demo") == state
    names.state_file("demo").write_text("{")
    with pytest.raises(NoLabError, match="cannot be read"):
        State.load("demo")


def test_one_command_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "RUN", tmp_path)
    monkeypatch.setattr("bench.netlab.state.LOCK_SECONDS", 0.05)
    with locked("demo"):
        with locked("other"):
            pass
        with pytest.raises(NetlabError, match="another command"), locked("demo"):
            pass
    with locked("demo"):
        pass


def test_programs_that_fail_say_what_and_why() -> None:
    assert command(["cat"], ["a", "b"]) == "a\nb\n"
    with pytest.raises(
        CommandError, match=r"'sh -c echo no >&2; exit 3' ended with 3 and said: no"
    ):
        command(["sh", "-c", "echo no >&2; exit 3"])
    with pytest.raises(CommandError, match=r"did not end within 0\.05 s"):
        command(["sleep", "5"], seconds=0.05)
    with pytest.raises(CommandError, match="no-such-program is not installed: apt-get install"):
        command(["no-such-program"])


def test_without_root_or_programs_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == ["a lab needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN), got user 1000: sudo"]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        "bench.netlab.system.environment", lambda: {"PATH": str(tmp_path), "LC_ALL": "C"}
    )
    with pytest.raises(UnsupportedError, match="iptables is not installed: apt-get install") as got:
        require()
    assert "ip is not installed: apt-get install iproute2" in str(got.value)

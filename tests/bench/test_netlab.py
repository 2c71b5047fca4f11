"""Real labs: what they do to traffic, and that nothing is left of them.

The machine may be busy while this runs. So rates are 20 to 50 Mbit/s, which cost next to no
processor, and bounds are wider than a lab's own tolerance, but narrower than the effect of the
setting that they are about: a rate that is not in force would be off by a factor of two or more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import results_file
from bench.netlab import (
    BadRequestError,
    CommandError,
    HelperError,
    Lab,
    LabExistsError,
    Link,
    NoLabError,
    Trace,
    UnsupportedError,
    check,
    leftovers,
    measure,
    missing,
    names,
    probes,
    take_down,
)
from bench.netlab.__main__ import main
from bench.netlab.background import PORT
from bench.netlab.checks import wire_share
from bench.netlab.control import Helper
from bench.netlab.processes import Process
from bench.netlab.state import locked
from bench.netlab.system import command, list_namespaces, socket_in
from tests.conftest import require_tool
from tests.project import ROOT

pytestmark = pytest.mark.tools

NAME = f"t{os.getpid()}"
LINK = Link(rate_mbit=50, rtt_ms=4)


def netlab() -> bool:
    return not missing()


@pytest.fixture(scope="module", autouse=True)
def _able() -> None:
    require_tool(
        netlab, "root, iproute2, iptables, and a kernel with veth, bridge, HTB and NFQUEUE"
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with Lab(NAME, hosts=3, link=LINK) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Lab:
    shared.set(rate_mbit=LINK.rate_mbit, rtt_ms=LINK.rtt_ms)
    return shared


def frames_mbit(lab: Lab, source: int, target: int, seconds: float = 0.4) -> float:
    """Return the rate of frames that one TCP connection makes."""
    where = (lab.namespace(source), lab.namespace(target), lab.address(target))
    return 8e-6 * probes.throughput(*where, seconds, 0.3) / wire_share(1500)


def rtt_ms(lab: Lab, source: int, target: int) -> float:
    where = (lab.namespace(source), lab.namespace(target), lab.address(target))
    return 1e3 * probes.median(probes.round_trips(*where, 25, lost_after=1.0))


def gone(name: str) -> bool:
    files = list(names.RUN.glob(f"{name}.*"))
    spaces = [space for space in list_namespaces() if names.belongs(space, name)]
    return not leftovers(name) and not files and not spaces


def owner(name: str, body: str) -> subprocess.Popen[str]:
    """Start a program that owns a lab, and wait until it says so."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from bench.netlab import Lab, Link\n"
        f"with Lab({name!r}, hosts=2, link=Link(rate_mbit=50, rtt_ms=4)) as lab:\n"
        f"    {body}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


# --- what it does to traffic ---------------------------------------------------------------------


def test_rate_and_round_trip_are_as_asked(lab: Lab) -> None:
    (one,) = check(lab, [(0, 1)], seconds=0.5)
    assert one.measured_mbit == pytest.approx(50, rel=0.15)
    assert one.measured_rtt_ms == pytest.approx(4, rel=0.3)  # without delay it would be 0.1
    assert one.measured_rtt_ms > 3.7  # less, at most, by the machine's own time: see Lab


def test_a_check_tells_when_they_are_not(lab: Lab) -> None:
    """What was asked for is still 50 Mbit/s and 4 ms; the lab is changed behind its back."""
    for space, device in ((names.hub(NAME), "p1"), (lab.namespace(1), names.DEVICE)):
        for line in Link(rate_mbit=25).shaping(device, "change"):
            command(["tc", "-n", space, *line.split()])
    Helper(NAME, "delay").ask(seconds=[0.004] * 3)
    try:
        assert "other delays than were asked for" in lab.status()["problems"][0]
        (one,) = check(lab, [(0, 1)], seconds=0.4)
        rate, rtt = one.problems()
        assert "asked for 50 Mbit/s, measured 2" in rate
        assert "asked for a round trip of 4 ms, measured" in rtt
    finally:
        lab.set(rate_mbit=20, rtt_ms=5)


def test_a_slow_host_is_slow_in_both_directions_and_its_round_trip_is_averaged(lab: Lab) -> None:
    lab.set(rate_mbit=12.5, rtt_ms=16, hosts=[2])
    fast = frames_mbit(lab, 0, 1)
    assert fast / frames_mbit(lab, 0, 2) == pytest.approx(4, rel=0.25)
    assert fast / frames_mbit(lab, 2, 0) == pytest.approx(4, rel=0.25)
    assert rtt_ms(lab, 0, 2) == pytest.approx(10, rel=0.2)
    assert rtt_ms(lab, 0, 1) == pytest.approx(4, rel=0.3)


def test_a_running_transfer_follows_a_change(lab: Lab) -> None:
    lab.set(rtt_ms=2)

    def received() -> int:
        return lab.counters()[1].received_bytes

    def rate(seconds: float) -> float:
        before, begun = received(), time.monotonic()
        time.sleep(seconds)
        return (received() - before) / (time.monotonic() - begun)

    with ThreadPoolExecutor(1) as pool:
        transfer = pool.submit(frames_mbit, lab, 0, 1, 1.3)
        time.sleep(0.3)
        fast = rate(0.3)
        lab.set(rate_mbit=12.5)
        time.sleep(0.3)  # what was in the queue
        slow = rate(0.3)
        transfer.result()
    assert fast / slow == pytest.approx(4, rel=0.25)


def test_packets_on_their_way_keep_their_order(lab: Lab) -> None:
    with (
        socket_in(lab.namespace(1), socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket_in(lab.namespace(0), socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind((lab.address(1), 0))
        receiver.settimeout(5)
        sender.connect(receiver.getsockname())
        for rtt, first in ((200.0, 0), (2.0, 50), (100.0, 100)):
            lab.set(rtt_ms=rtt)
            for number in range(first, first + 50):
                sender.send(number.to_bytes(4, "big"))
        assert [int.from_bytes(receiver.recv(4), "big") for _ in range(150)] == list(range(150))


@contextmanager
def connected(lab: Lab) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a TCP connection from host 0 to host 1, the client's first."""
    with (
        socket_in(lab.namespace(1), socket.AF_INET, socket.SOCK_STREAM) as listener,
        socket_in(lab.namespace(0), socket.AF_INET, socket.SOCK_STREAM) as client,
    ):
        listener.bind((lab.address(1), 0))
        listener.listen(1)
        listener.settimeout(5)
        client.settimeout(5)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            yield client, server


def test_hosts_use_cubic_and_have_no_way_around_the_delay(lab: Lab) -> None:
    with connected(lab) as (client, server):
        for end in (client, server):
            name = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") == b"cubic"
    devices = json.loads(command(["ip", "-n", lab.namespace(0), "-j", "addr"]))
    families = [a["family"] for row in devices if row["ifname"] == "eth0" for a in row["addr_info"]]
    assert families == ["inet"]
    routes = json.loads(command(["ip", "-n", lab.namespace(0), "-j", "route"]))
    assert [route["dst"] for route in routes] == [names.NETWORK]


def test_a_trace_is_replayed(lab: Lab) -> None:
    text = "seconds,host,rate_mbit,rtt_ms\n0,*,20,2\n0.2,1,40,\n0.2,0-1,5,\n0.4,0-1,0,\n"
    replay = lab.play(Trace.parse(text))
    assert replay.wait(20)
    assert lab.state().links == [
        Link(rate_mbit=20, rtt_ms=2),
        Link(rate_mbit=40, rtt_ms=2),
        Link(rate_mbit=20, rtt_ms=2),
    ]
    assert lab.state().flows == {}
    assert lab.carried(0, 1) > 0
    shaper = command(["tc", "-n", lab.namespace(1), "class", "show", "dev", names.DEVICE])
    assert "rate 40Mbit ceil 40Mbit" in shaper
    assert [one.asked_seconds for one in replay.applied] == [0, 0.2, 0.4]
    with pytest.raises(BadRequestError, match=r"names \[7\]"):
        lab.play(Trace.parse("seconds,host,rate_mbit,rtt_ms\n0,7,20,2\n"))


def test_background_traffic_takes_its_share_and_stops(lab: Lab) -> None:
    with socket_in(lab.namespace(1), socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind((lab.address(1), PORT))
        nobody.setblocking(False)
        lab.background(0, 1, 30)
        with pytest.raises(BadRequestError, match="0-1"):
            check(lab)
        before, counted, begun = lab.carried(0, 1), lab.counters(), time.monotonic()
        left = frames_mbit(lab, 0, 1)
        carried, now = lab.carried(0, 1) - before, time.monotonic()
        after = lab.counters()
        lab.background(0, 1, 0)
        with pytest.raises(BlockingIOError):
            nobody.recv(1)  # the host drops it before a program could see it
    assert carried * 8e-6 / (now - begun) == pytest.approx(30, rel=0.15)
    assert left == pytest.approx(20, rel=0.25)
    received = (after[1] - counted[1]).received_bytes
    assert received > carried + left * 1e6 / 8 * 0.4
    time.sleep(0.1)  # what is in the queue still arrives
    stopped = lab.carried(0, 1)
    time.sleep(0.1)
    assert lab.carried(0, 1) == stopped


def test_counters_are_frames_on_the_wire(lab: Lab) -> None:
    size = 1_448_000
    before = lab.counters()
    with connected(lab) as (client, server):
        server.settimeout(5)
        client.setblocking(False)
        sent = got = 0
        while got < size:
            if sent < size:
                with contextlib.suppress(BlockingIOError):
                    sent += client.send(bytes(size - sent))
            got += len(server.recv(1 << 20))
    after = lab.counters()
    wire = size / 1448 * 1514
    # Segments that are not full, and repeats of what is late, may add a little.
    assert wire <= (after[0] - before[0]).sent_bytes < 1.05 * wire
    assert wire <= (after[1] - before[1]).received_bytes < 1.05 * wire
    assert (after[2] - before[2]).sent_bytes < 0.01 * wire
    assert (after[1] - before[1]).sent_bytes < 0.1 * wire  # what acknowledges it


def test_programs_run_on_a_host(lab: Lab) -> None:
    show = ["sh", "-c", 'cat; ip -4 -o addr show eth0; echo "$X" >&2; exit 3']
    done = lab.run(1, show, seconds=20, text="in\n", env={"X": "y", "PATH": os.environ["PATH"]})
    assert done.returncode == 3
    assert done.stdout.startswith("in\n")
    assert lab.address(1) + "/24" in done.stdout
    assert done.stderr == "y\n"
    begun = time.monotonic()
    with pytest.raises(CommandError, match=r"on host 0 did not end within 0\.2 s.*words"):
        lab.run(0, ["sh", "-c", "echo words; sleep 30 & sleep 30"], seconds=0.2)
    assert time.monotonic() - begun < 10
    with pytest.raises(BadRequestError, match="hosts are 0 to 2, got 3"):
        lab.run(3, ["true"], seconds=1)


def test_requests_that_make_no_sense_change_nothing(lab: Lab) -> None:
    before = lab.state()
    with pytest.raises(BadRequestError, match=r"names \[3\]"):
        lab.set(rate_mbit=5, hosts=[0, 3])
    with pytest.raises(BadRequestError, match="a rate is"):
        lab.set(rate_mbit=0)
    assert lab.state() == before


def test_status(lab: Lab) -> None:
    status: dict[str, Any] = lab.status()
    assert [row["rate_mbit"] for row in status["hosts"]] == [50, 50, 50]
    # Half a round trip, less what the machine needs by itself.
    assert status["delay"]["seconds"] == [0.002 - status["machine_rtt_ms"] / 2e3] * 3
    assert 0 < status["machine_rtt_ms"] <= 0.2
    assert status["delay"]["cpu_seconds"] > 0
    assert json.loads(json.dumps(status)) == status


# --- up and down ---------------------------------------------------------------------------------


def test_two_labs_have_the_same_addresses_and_never_meet(lab: Lab) -> None:
    other = f"{NAME}b"
    with Lab(other, hosts=2, link=LINK) as second:
        assert second.address(1) == lab.address(1)
        before = lab.counters()
        sockets = [
            socket_in(one.namespace(1), socket.AF_INET, socket.SOCK_DGRAM) for one in (lab, second)
        ]
        with sockets[0] as first_socket, sockets[1] as second_socket:
            for one in sockets:
                one.bind((second.address(1), 4000))
                one.settimeout(5)
            second.run(
                0,
                [sys.executable, "-c", _SEND.format(second.address(1))],
                seconds=20,
            )
            assert second_socket.recv(10) == b"hello"
            first_socket.settimeout(0.05)
            with pytest.raises(TimeoutError):
                first_socket.recv(10)
        assert (lab.counters()[1] - before[1]).received_bytes < 1000
    assert gone(other)
    assert lab.status()["problems"] == []
    assert rtt_ms(lab, 0, 1) == pytest.approx(4, rel=0.3)


_SEND = "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'hello', ('{}', 4000))"


def test_nothing_is_made_outside_its_namespaces_and_nothing_is_left(shared: Lab) -> None:
    def outside() -> str:
        links = command(["ip", "-o", "link"])
        return links + command(["ip", "route"]) + command(["tc", "qdisc", "show"])

    name, before, spaces = f"{NAME}c", outside(), list_namespaces()

    def use() -> None:
        with Lab(name, hosts=2, link=LINK) as lab:
            assert outside() == before
            own = {names.hub(name), lab.namespace(0), lab.namespace(1)}
            assert set(list_namespaces()) - set(spaces) == own
            with pytest.raises(LabExistsError, match="already"):
                Lab(name, hosts=2).up()
            Lab(name, hosts=2, link=LINK, replace=True).up()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        use()
    assert gone(name)
    assert outside() == before
    assert list_namespaces() == spaces
    assert take_down(name) == []
    with pytest.raises(NoLabError, match="no lab"):
        Lab.open(name)


def test_what_fails_half_way_leaves_nothing() -> None:
    name = f"{NAME}d"
    lab = Lab(name, hosts=2, link=LINK, congestion="nosuch")
    with pytest.raises(UnsupportedError, match=r"must be one of .*reno.*, got 'nosuch'"):
        lab.up()
    assert gone(name)


def test_down_clears_away_what_a_killed_owner_leaves() -> None:
    name = f"{NAME}e"
    body = (
        "lab.background(0, 1, 1); p = lab.popen(0, ['sleep', '300']); print('up', flush=True); "
        "print(p.pid, flush=True); time.sleep(300)"
    )
    with contextlib.ExitStack() as stack:
        bystander = stack.enter_context(subprocess.Popen(["sleep", "300"]))
        stack.callback(bystander.kill)
        process = stack.enter_context(owner(name, body))
        stack.callback(take_down, name)
        stack.callback(process.kill)
        assert process.stdout is not None
        rank = Process.of(int(process.stdout.readline()))
        process.kill()
        process.wait()
        helpers = [Helper(name, kind).process() for kind in ("delay", "background")]
        assert rank is not None
        assert None not in helpers
        assert not gone(name)
        # A number that now is somebody else's: same pid, other start time.
        stranger = Process.of(bystander.pid)
        assert stranger is not None
        pid_file = names.pid_file(name, "background")
        kept = pid_file.read_text()
        pid_file.write_text(f"{stranger.pid} {stranger.started - 1}\n")
        Helper(name, "background").end()
        assert stranger.alive()
        pid_file.write_text(kept)
        assert names.hub(name) in take_down(name)
        assert gone(name)
        assert stranger.alive()
        assert not rank.alive()
        assert not any(one.alive() for one in helpers if one is not None)


def test_commands_that_wait_for_one_that_takes_the_lab_down_start_anew() -> None:
    """The lock's file goes with the lab; who waited for it must not believe to hold the lock."""
    name, inside = f"{NAME}k", []

    def use(number: int) -> None:
        for _ in range(10):
            with locked(name):
                inside.append(number)
                assert inside == [number]
                time.sleep(0.001)
                inside.remove(number)
                names.lock_file(name).unlink()  # from here on another may lock a file of its own

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert gone(name)


def test_helpers_end_by_themselves_when_their_lab_is_gone() -> None:
    """Even a pid file that was never written leaves no process for ever."""
    name = f"{NAME}f"
    with Lab(name, hosts=2, link=LINK):
        delay = Helper(name, "delay").process()
        assert delay is not None
        names.pid_file(name, "delay").unlink()
    deadline = time.monotonic() + 20
    while delay.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not delay.alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_owner_that_is_asked_to_end_takes_its_lab_down(number: signal.Signals) -> None:
    name = f"{NAME}g"
    with owner(name, "print('up', flush=True); time.sleep(300)") as process:
        process.send_signal(number)
        assert process.wait(30) != 0
    assert gone(name)


def test_without_its_delay_process_a_lab_lets_nothing_through_and_says_so() -> None:
    """Traffic without delay would be a wrong result that nobody notices."""
    name = f"{NAME}h"
    with Lab(name, hosts=2, link=LINK) as lab:
        delay = Helper(name, "delay").process()
        assert delay is not None
        delay.end(0)
        assert "nothing gets through" in lab.status()["problems"][0]
        where = (lab.namespace(0), lab.namespace(1), lab.address(1))
        assert probes.round_trips(*where, 2, lost_after=0.05, skip=0) == []
        with pytest.raises(HelperError, match=r"does not answer.*down and up again"):
            lab.set(rtt_ms=8)
    assert gone(name)


def test_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = ("--name", f"{NAME}i")

    def run(command: str, *arguments: str) -> tuple[int, str, str]:
        status = main([command, *name, *arguments])
        return status, *capfd.readouterr()

    up = run("up", "--hosts", "2", "--rate-mbit", "40", "--output", "json")
    try:
        assert json.loads(up[1]) == {"name": name[1], "addresses": ["10.77.0.1", "10.77.0.2"]}
        assert run("set", "--host", "1", "--rtt-ms", "6") == (0, "", "")
        assert "nothing to set" in run("set")[2]
        assert "FROM-TO=MBIT" in run("set", "--background", "0-1")[2]
        trace = tmp_path / "trace.csv"
        trace.write_text("seconds,host,rate_mbit,rtt_ms\n0,*,20,\n0.1,0,30,\n0.1,0-1,2,\n")
        played = run("trace", str(trace), "--output", "json")[1].splitlines()
        assert [json.loads(line)["asked_seconds"] for line in played] == [0, 0.1]
        code, out, _ = run("status", "--output", "json")
        assert code == 0
        rows = json.loads(out)["hosts"]
        assert [(row["rate_mbit"], row["rtt_ms"]) for row in rows] == [(30, 0), (20, 6)]
        assert "background 0-1: 2 Mbit/s" in run("status")[1]
        assert run("set", "--background", "0-1=0")[0] == 0
        code, out, _ = run("check", "--seconds", "0.3", "--output", "json")
        assert [row["asked_mbit"] for row in json.loads(out)["pairs"]] == [20, 20]
        assert code == bool(json.loads(out)["problems"])
        code, _, err = run("up")
        assert code == 2
        assert "already" in err
        done = subprocess.run(
            [
                *(sys.executable, "-m", "bench.netlab", "exec", *name, "1", "--"),
                *("sh", "-c", "ip -4 -o addr; exit 5"),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=40,
        )
        assert "10.77.0.2/24" in done.stdout
        assert done.returncode == 5
    finally:
        down = run("down")
    assert "removed netlab-" in down[1]
    assert "nothing was left" in run("down")[1]
    assert run("status")[0] == 2


def test_the_measurement_writes_a_well_formed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in (
        ("NAME", f"{NAME}j"),
        ("HOSTS", 2),
        ("NETWORKS", ((50.0, 2.0),)),
        ("BACKGROUND_MBIT", (20.0,)),
        ("FASTEST_MBIT", 100.0),
        ("SECONDS", 0.2),
    ):
        monkeypatch.setattr(measure, key, value)
    measure.main(["--output", str(tmp_path / "netlab.json"), "--repeats", "1"])
    document = json.loads((tmp_path / "netlab.json").read_text(encoding="utf-8"))
    assert results_file.check(document) == []
    cases = [row["case"] for row in document["rows"]]
    assert cases[:3] == ["one pair", "one pair", "all links at once, both ways"]
    assert "what the delay process carries" in capsys.readouterr().out
    assert document["verdicts"][-1]["holds"] is False  # 100 Mbit/s were allowed here
